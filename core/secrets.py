"""Masks the values of secrets, by the names that stand before them: of a token, a key, a secret, a password.

    masked_command(["train.py", "--token=hunter2", "--api-key", "swordfish", "--lr", "1"])
    -> ["train.py", "--token=***", "--api-key", "***", "--lr", "1"]

People mail reports. So a command line is masked before it is stored, sent or printed; the job gets it as it was typed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MASK = "***"

# Which names say so. A name is taken apart into words (`-`, `_`, `.`, changes of case), without its numbers. In doubt a
# value is masked.

_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
_WORKING_FOLDERS = frozenset({"PWD", "OLDPWD"})
_ALWAYS = re.compile(r"secrets?|password|passwords|passwd|passphrase|credentials?|creds|webhooks?")
"""At any place of the name: SECRET_KEY_BASE, password_prod."""
_LAST = re.compile(r"token|key|pwd|pass|auth|authorization|bearer|jwt|cookie")
"""As the last word alone: not in token_ids, max_tokens, num_key_value_heads, key_file."""
_COMPOUND = re.compile(r".*(secret|password|passwd|token|(api|access|auth|private|ssh)key)")
_PAIRS = re.compile(r"(.*-)?((api|access|auth|private)-(keys|tokens)|access-key-id)")
_SIGNATURES = re.compile(r"(.*-)?(sig|signature)")
"""In the query of an address alone."""
_OF_A_THING = frozenset("file path dir directory folder name length len size type host port required".split())  # noqa: SIM905
"""A name that ends so says where the secret is, or what it is like."""
_ORDINARY = {
    "token": "pad eos bos mask sep cls unk image video audio special stop start begin end per max min num n",
    "key": "sort public primary foreign group join index column label text image video audio num n",
    "pass": "forward backward single multi first second per max min num n",
}
"""What a tokenizer, a table or a loop means by the word: `--pad-token`, `--sort-key`, `--max-pass`."""
_HAS_NO_VALUE = frozenset({"no", "without", "add", "skip", "enable", "disable", "allow", "require", "has", "is"})
"""An option that begins so is a switch: the next argument is no value of it."""


def is_secret_name(name: str) -> bool:
    """Whether the name of an option or a variable says that its value is a secret.

    >>> [is_secret_name(name) for name in ("--hf-token", "WANDB_API_KEY", "model.apiKey", "--tokenizer")]
    [True, True, True, False]
    """
    words = _words(name)
    if not words or words[-1] in _OF_A_THING or name in _WORKING_FOLDERS:
        return False
    last = words[-1]
    if len(words) > 1 and words[-2] in _ORDINARY.get(last, "").split():
        return False
    return bool(
        any(map(_ALWAYS.fullmatch, words))
        or _LAST.fullmatch(last)
        or _COMPOUND.fullmatch(last)
        or _PAIRS.fullmatch("-".join(words))
    )


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


_OPTION = re.compile(r"--?([A-Za-z][\w.-]*(=.*)?)?", re.DOTALL)
_NOT_IN_A_NAME = re.compile(r"""[\s?&:;,'"{]""")
_SHELLS_OPTION = re.compile(r"-[A-Za-z]*c")


def masked_command(words: Sequence[str]) -> list[str]:
    """The words of a command line, for others to read.

    Returns as many words, with `***` for each value of a secret: in `--token=X`, `--token X`, `TOKEN=X`, and where
    `masked_text` finds one within a word. The name alone decides, so a secret without one is not found.
    """
    found: list[str] = []
    option = ""
    for at, word in enumerate(words):
        if word and _takes_next(option) and not _OPTION.fullmatch(word):
            found.append(MASK)
            option = option if option.lower().endswith("s") else ""  # --api-keys X Y
        else:
            value = 0 if _is_for_shell(words, at) else _after_name(word)
            found.append(word[:value] + MASK if value else masked_text(word))
            option = word
    return found


def _is_for_shell(words: Sequence[str], at: int) -> bool:
    """`bash -c "TOKEN=X python train.py"`: what comes after the value is the rest of a command line."""
    return at > 1 and words[at - 2].endswith("sh") and _SHELLS_OPTION.fullmatch(words[at - 1]) is not None


def _after_name(word: str) -> int:
    """Where the value begins in `--token=X`, `TOKEN=X`, `+model.token=X`, `--env=TOKEN=X`: all behind the sign is the
    value, blanks included. 0: there is none."""
    start = 0
    while (sign := word.find("=", start)) >= 0 and not _NOT_IN_A_NAME.search(word, start, sign):
        if is_secret_name(word[start:sign]):
            return sign + 1 if sign + 1 < len(word) else 0
        start = sign + 1
    return 0


def _takes_next(word: str) -> bool:
    """Whether it is an option whose value, the next argument, is a secret."""
    if not word.startswith("-") or "=" in word or not _OPTION.fullmatch(word) or not is_secret_name(word):
        return False
    return _words(word)[0] not in _HAS_NO_VALUE


def masked_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for others to read: `***` in place of each value whose name says that it is a secret.

    Returns the same names, in their order. Other values are masked as `masked_text` does.
    """
    return {name: MASK if value and is_secret_name(name) else masked_text(value) for name, value in environ.items()}


# Within a text: an address, JSON, a header of HTTP, a command line for a shell.

_BEFORE_HOST = re.compile(r"([A-Za-z][\w+.-]{0,30}://)([^\s/]*)@")
_NAMED = re.compile(r"""(?<![\w.-])(?P<name>[\w.-]+)(?![\w.-])(?P<sign>["'\]\\]*\s*(?:=>|:=|==?|:)\s*|\s+)""")


def _value(inside: str) -> re.Pattern[str]:
    """A value as a shell or JSON has it: to the next blank or sign, with what stands in quotes. `inside`: the quote
    that is open where it begins, and ends it."""
    quoted = "|".join(rf"{quote}(?:\\.|[^{quote}\\])*{quote}?" for quote in "\"'" if quote != inside)
    return re.compile(
        rf"""(?:(?:bearer|basic|token)\s+)?(?:{quoted}|\\.|[^\s"'\\;&|,}}\])]|,(?!\s*["'\\]*[\w.-]+["'\\]*\s*[=:]))+""",
        re.IGNORECASE | re.DOTALL,
    )


_VALUES = {inside: _value(inside) for inside in ("", '"', "'")}


def masked_text(text: str) -> str:
    r"""A text that holds options, variables or addresses, for others to read. Prose may lose words, as after `key:`.

    Returns it with `***` in place of what stands before the host of an address, and behind the name of a secret:

    >>> masked_text("https://me:hunter2@host/data?token=hunter2&part=3")
    'https://***@host/data?token=***&part=3'
    >>> masked_text('curl -H "Authorization: Bearer hunter2" --data \'{"api_key": "hunter2", "n": 1}\' host')
    'curl -H "Authorization: ***" --data \'{"api_key": ***, "n": 1}\' host'
    """
    text = _BEFORE_HOST.sub(_without_user, text)
    found: list[str] = []
    at, quotes = 0, _OpenQuotes(text)
    for named in _NAMED.finditer(text):
        if named.start() < at or not _is_secret_at(text, named):
            continue
        for inside in dict.fromkeys((quotes.at(named.end()), "")):  # an apostrophe opens no quote
            if (value := _VALUES[inside].match(text, named.end())) is not None:
                found += [text[at : named.end()], MASK]
                at = value.end()
                break
    return "".join([*found, text[at:]])


def _without_user(address: re.Match[str]) -> str:
    """A user without a password stays where that is no secret: `ssh://git@host`."""
    is_secret = ":" in address[2] or "http" in address[1].lower()
    return f"{address[1]}{MASK}@" if is_secret and address[2] else address[0]


def _is_secret_at(text: str, named: re.Match[str]) -> bool:
    name, sign, before = named["name"], named["sign"], text[max(0, named.start() - 1) : named.start()]
    if not sign.strip():
        return _takes_next(name) and not _OPTION.match(text, named.end())
    if sign == ":" and before == "/":
        return False  # a host and its port, or a folder: `-v /run/secrets:/run/secrets`
    return is_secret_name(name) or (before in ("?", "&") and bool(_SIGNATURES.fullmatch("-".join(_words(name)))))


class _OpenQuotes:
    """The quote that is open at a place of a text. The places are asked for in their order, so that a long text is read
    once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._read = 0
        self._is_open = dict.fromkeys("\"'", False)

    def at(self, place: int) -> str:
        for quote in self._is_open:
            self._is_open[quote] ^= bool(self._text.count(quote, self._read, place) % 2)
        self._read = place
        return next((quote for quote, is_open in self._is_open.items() if is_open), "")
