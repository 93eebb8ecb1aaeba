"""Judges with `lockstep verify SCRIPT.py` whether N ranks take the steps of one process.

the script on N ranks, observed                what they draw, read and start from, compared
once more without random numbers               where a forward pass draws any
the script as one process                      given the ranks' samples in one batch, their first
                                               values and settings
where a gradient differs: one process a rank   given that rank's samples alone; the gradients show
                                               how they were added
"""
