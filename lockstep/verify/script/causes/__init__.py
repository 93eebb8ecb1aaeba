"""Why ranks of a script do not take the steps of one process.

A cause is tried, then named, then placed:

    ranks.py, samples_of_ranks.py        what ranks show by themselves
    unfinished.py                        ranks that hang, fail, or take fewer steps
    settings.py                          settings of the optimizer
    explanation.py                       in which order causes of the first difference are tried
    trials.py                            each of them, by another run
    evidence.py                          the gradients by which they are named:
    gradients.py, reduction.py           what a rank computes, and how ranks combine it
    shared_model.py, replicas.py         ranks with parts of one model, and with all of it
    first_operation.py, operations.py    the first operation that differs
    excuses.py                           causes that make up for each other
    cause_lines.py, fixes.py             the script's own line, and what to write instead
"""
