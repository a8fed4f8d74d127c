"""`python -m raykv` is the `raykv` command."""

from raykv.cli.main import main

if __name__ == "__main__":
    main()
