"""`python -m fivefold` is the `fivefold` command."""

from fivefold.cli.main import app

if __name__ == "__main__":
    app(prog_name="fivefold")
