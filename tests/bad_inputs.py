"""Values that fields refuse, by kind, as a command line writes them."""

from specjax import fields
from specjax.cli import decode_config
from specjax.cli.flags import Listed
from specjax.decoding import options
from train.pretraining import documents
from train.run import config as train_config
from train.run import optimizer

MANY_DIGITS = "9" * 5000
_PATHS = ["", " ", "a" * 300, "~nosuchuser/x", "file/x", "a\0b"]
_NUMBERS = ["", "x", "-1", "nan", "inf", "1e400", MANY_DIGITS]

# In a folder that holds a file "file" and a folder "folder".
TEXTS = {
    fields.Whole: ["", "x", "1.5", "-1", str(2**63), str(2**64), MANY_DIGITS, "nan", "()"],
    fields.Number: _NUMBERS,
    fields.Flag: ["maybe", "2", "-"],
    fields.Choice: ["", "nosuch", "AUTO", "\udcff"],
    fields.Text: ["\udcff"],
    fields.PathOrName: _PATHS,
    fields.InputFile: [*_PATHS, "nosuch", "folder", "/dev/null"],
    fields.InputFolder: [*_PATHS, "nosuch", "file", "/dev/null"],
    fields.OutputFile: [*_PATHS, "folder", "nosuch/x", "/dev/full", "/dev/stdout", "/proc/x"],
    fields.OutputFolder: [*_PATHS, "file", "file/x/y", "/dev/full"],
    options.Ladder: [
        *["5", "x", "(1,", "(1, 2)", "((1, 2),)", "((None,),)", "((4, 2, 1),)", "((0, 2, 1),)"],
        *["((1, 4, 1025),)", "((1, 4, -1),)", "((1, 4, 2), (3, 9, 1))", "(('a', 2, 3),)"],
    ],
    decode_config.DraftLengthText: ["", "x", "-1", "1.5", "1025", str(10**6), MANY_DIGITS],
    train_config.TargetName: _PATHS,
    train_config.RunFolder: [*_PATHS, "file", "file/x/y", "/dev/full", "."],
    train_config.HeadFolder: [*_PATHS, "nosuch", "file", "EAGLE3"],
    train_config.DataFolders: [*_PATHS, "nosuch", "file", "folder,", "folder,nosuch"],
    documents.DocumentFiles: [*_PATHS, "nosuch", "folder,", "folder,nosuch"],
    optimizer.Scales: ["x", "a:", ":1", "a:-1", "a:nan", "a:1,a:2"],
}


def texts(kind):
    """Bad values of a kind, as texts for a command line."""
    if isinstance(kind, fields.Either):
        # What one of the kinds refuses another might take.
        first, *others = map(texts, kind.kinds)
        return [value for value in first if all(value in other for other in others)]
    if isinstance(kind, Listed):
        wrong = [one for one in texts(kind.kind) if one or not kind.empty]
        return [*wrong, *(f"{one}," for one in wrong)]
    if isinstance(kind, fields.Items):
        wrong = ["(None,)", "((),)"]
        if isinstance(kind.kind, fields.Text):
            return [*wrong, "5", "(5,)", "('',)"]
        return [*wrong, "(1,", "('a',)", "(-1,)", "(1e400,)", *(["()"] if kind.least else [])]
    if isinstance(kind, fields.Text):
        return TEXTS[fields.Text] + ([] if kind.empty else ["", " "])
    return TEXTS[type(kind)]


def flat(kinds, prefix=""):
    """The kinds of all fields by their dotted names."""
    for name, kind in kinds.items():
        if isinstance(kind, fields.OptionalSection):
            kind = kind.fields
        if isinstance(kind, dict):
            yield from flat(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, kind
