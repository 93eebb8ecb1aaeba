"""The private names of torch that Lockstep uses.

Every function or method of torch that it replaces is here, too.

One file per purpose. Each says what it is for, why the public part of torch does not do, with which
versions of torch it was seen to work, and what happens when the name is gone. `tests/torch_compat/`
has a test for each, which fails when torch moves or changes it; `tests/test_house.py` finds private
names of torch anywhere else in the package.
"""
