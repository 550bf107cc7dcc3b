"""
Model cards of runs that a comparison made, with its tables.

    python recipes/experiments/cards.py out/encoder none--seed0 symmetric--seed0

Each becomes `model_cards/encoder-symmetric--seed0.md`, with its figure beside it.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from hf_symqk.cards import CARD, SCORES_FIGURE, write_model_card


CARDS = Path(__file__).resolve().parents[2] / "model_cards"
_PUBLISHED = "**Published"  # the paper's own table, which is not about the run


def make_card(comparison: Path, run: str, cards: Path = CARDS) -> Path:
    """
    Writes the card of one run of a comparison.

    Args:
        comparison (`Path`): Output folder of `compare.py`.
        run (`str`): Name of the run's folder in it.
        cards (`Path`, *optional*): Folder that takes the card and its figure; `model_cards` by default.

    Returns:
        `Path`: The card.
    """
    name = f"{comparison.name}-{run}"
    folder = comparison / "runs" / run
    for needed in (comparison / "comparison" / "comparison.md", folder / SCORES_FIGURE):
        if not needed.is_file():
            raise FileNotFoundError(f"there is no {str(needed)!r}: a card is made of a finished run of compare.py.")
    report = (comparison / "comparison" / "comparison.md").read_text(encoding="utf-8")
    write_model_card(folder, comparison=report.partition(_PUBLISHED)[0], model_name=name, license="apache-2.0")
    text = (folder / CARD).read_text(encoding="utf-8").replace(f"({SCORES_FIGURE})", f"({name}.png)")
    path = cards / f"{name}.md"
    path.write_text(text, encoding="utf-8")
    shutil.copyfile(folder / SCORES_FIGURE, cards / f"{name}.png")
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path, help="output folder of compare.py")
    parser.add_argument("runs", nargs="+", help="names of runs in it")
    arguments = parser.parse_args()
    for run in arguments.runs:
        print(f"wrote {make_card(arguments.comparison, run)}")
