"""Recovery without a stop: the ranks that are left go on where others die.

    launcher: ranks (who is left, and with how many a strategy goes on), hosts (on several machines)
    → world (a file that says who goes on, as which rank)
    → rank: survivor (hears of it, and leaves what waits for the dead)

What a rank does then, placing the model again and loading it from memory, is in
`trainer/recovered.py`.
"""
