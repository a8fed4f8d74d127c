"""The command line: what `raykv` and `python -m raykv` run."""
