"""Checks of a training loop while it runs, each by what it looks at.

    findings.py     what was found, and how far the loop is
    made.py         wrappers, optimizers and schedules, and where they were made
    models.py       who trains a model's parameters, in which mode, tied and frozen weights
    passes.py       backward passes, clipping, accumulation
    updates.py      what each optimizer uses, and what it changes
    schedules.py    learning rates
    samplers.py     the order of samples

`TrainingChecks` (training_checks.py) hands each event of the loop to those that it concerns.
"""
