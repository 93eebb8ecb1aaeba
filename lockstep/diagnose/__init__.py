"""Explains failures: known errors and their fixes (`known_errors`), symptoms (`page`), checks before a run (`doctor`).

It reads files and the environment, and returns text. torch is loaded only by checks that need it.
"""
