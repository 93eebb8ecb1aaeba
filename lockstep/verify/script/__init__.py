"""Judges with `lockstep verify SCRIPT.py` whether N ranks take the steps of one process.

the script on N ranks, observed                what they draw, read and start from, compared
once more without random numbers               where a forward pass draws any
the script as one process                      given the ranks' samples in one batch, their first
                                               values and settings
where a gradient differs: one process a rank   given that rank's samples alone; the gradients show
                                               how they were added

judge.py is this way, line by line. Around it:

    runs.py, task.py         start processes, each with a task: what it is given, and without what
    observed/                runs the script in such a process, and writes a record
    record.py                of one process; recorded_lines.py, of the script's own lines
    world.py                 puts together what ranks hold of one model
    vectors.py, flows.py     a step's gradients, and its outputs of modules
    comparison.py            runs ranks and one process, and compares their gradients and updates
    one_process.py           what one process is given of the ranks; feeds.py, which samples
    causes/                  why there is a difference, and at which line
    signs.py                 the table of the report
    pairs/                   compares two scripts by the same means
"""
