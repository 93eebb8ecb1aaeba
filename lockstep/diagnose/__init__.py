"""What is wrong: known errors and mends (`known_errors`), symptoms without an error, checks before a run (`doctor`).

Files and environment in, text out. Nothing here loads torch before a check that needs it runs.
"""
