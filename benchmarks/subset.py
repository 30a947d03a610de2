"""A balanced part of a zip of labelled images: so many of each class, the first by name.

    python benchmarks/subset.py cifar10.zip cifar10-part.zip --train 1000 --test 500

The zip holds `train/CLASS/…` and `test/CLASS/…`; the part is what the studies in docs/results/studies.md were made on.
"""

import argparse
from collections import Counter
from pathlib import Path
from zipfile import ZipFile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=1000, help="training images of each class")
    parser.add_argument("--test", type=int, default=500, help="test images of each class")
    args = parser.parse_args()
    wanted, taken = {"train": args.train, "test": args.test}, Counter()
    with ZipFile(args.source) as source, ZipFile(args.out, "w") as part:
        for name in sorted(source.namelist()):
            *_, kind, label, file = ["", "", *name.split("/")]
            if file and taken[kind, label] < wanted.get(kind, 0):
                taken[kind, label] += 1
                part.writestr(name, source.read(name))
    print(f"{sum(taken.values()):,} images in {len(taken)} folders")


if __name__ == "__main__":
    main()
