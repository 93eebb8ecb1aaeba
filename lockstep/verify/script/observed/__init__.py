"""What runs in the process of a script, beside it, and records what flows through its steps.

It calls no collective of its own, so that it neither hangs a script nor repairs one.

    observe.py               the script's own run, from the first hook to the record
    observed_models.py       models: names, first values, what this rank holds of them
    untrained.py             networks that are called and not trained
    observed_pass.py         the passes of a micro-batch: generators, and a run's conditions
    loaders.py, orders.py    samples of loaders, and the order of their passes
    draws.py, reads.py       random numbers of the loop, and what it reads without a loader
    given_updates.py         gradients and settings that the task gives an update
    noted_calls.py           what is made, registered, stepped and seeded
    traced_operations.py     each operation; passed_on.py, what functions return unchanged
    broadcasts.py            losses whose predictions and targets broadcast
    saved_files.py           files that the script saves, which are put back
    hangs.py                 ends ranks that wait for each other
    values.py                copies and fingerprints of tensors and samples
"""
