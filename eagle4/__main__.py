"""`python -m eagle4`: the same as the `eagle4` command."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
