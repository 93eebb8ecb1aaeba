"""Judges with `lockstep verify SCRIPT.py` whether N ranks take the steps of one process.

the script on N ranks, observed                what they draw, read and start from, compared
once more without random numbers               where a forward pass draws any
the script as one process                      given the ranks' samples in one batch, their first
                                               values and settings
where a gradient differs: one process a rank   given that rank's samples alone; the gradients show
                                               how they were added

runs.py starts processes, each with a task (task.py). In each of them observe.py runs the script
(observed_models.py, observed_pass.py, draws.py, values.py), and writes a record (record.py,
recorded_lines.py); hangs.py ends ranks that wait for each other. judge.py is the way above: it
looks at the ranks (ranks.py, samples_of_ranks.py), puts together what they hold (world.py),
compares with one process (comparison.py), and explains (explanation.py, by gradients.py,
reduction.py and operations.py). cause_lines.py, fixes.py and signs.py make the report. pair.py
compares two scripts by the same means.
"""
