"""`python -m everstep` is the command `everstep`."""

from everstep.cli import main

if __name__ == "__main__":
    main(prog_name="everstep")
