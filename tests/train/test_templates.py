"""Stage I's templates are the paper's, and an example's template depends on nothing but its id."""

from collections import Counter

from arcaligner.train.templates import RECONSTRUCTION_TEMPLATES, choose_template, stable_number

# Table "Stage-I instruction templates", as printed.
PAPER = (
    "Background: [B]. This is equivalent to: [T].",
    "Rewrite the background in your own words: [B] → [T].",
    "Provide a restatement of the background: [B]. Return: [T].",
    "[B] is a paraphrase of what? Answer with: [T].",
    "These two expressions convey the same meaning: (1) [B] (2) [T].",
    "Restate [B] using a single sentence. Output only [T].",
)


def test_templates_are_the_papers():
    written = tuple(f"{t.before}[B]{t.after} [T]." for t in RECONSTRUCTION_TEMPLATES)
    assert written == PAPER


def test_the_template_is_fixed_by_the_id():
    assert choose_template("row-1") is choose_template("row-1")
    # Written out: another hash would change every training set, and `hash` does so in each process.
    assert stable_number("recon_train_0", 1000) == 200


def test_all_templates_are_used_about_equally():
    counts = Counter(choose_template(f"row-{number}").intent for number in range(6000))
    assert len(counts) == 6 and min(counts.values()) > 850
