"""`python -m lsgpt.benchmarks` is `lsgpt bench`."""

import sys

import lsgpt_cli


if __name__ == "__main__":
    sys.exit(lsgpt_cli.main(["bench", *sys.argv[1:]]))
