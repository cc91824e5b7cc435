"""HTML in which everything that comes from outside is text, and nothing of it is ever a tag."""

import html
import unicodedata


class Markup(str):
    """HTML that is finished; any other text is escaped where it is put into a tag."""


# Controls, halves of a pair, and marks that turn the order of letters around.
_HIDDEN = {"Cc", "Cf", "Cs"}


def escaped(text: str) -> Markup:
    """A text as HTML, also within an attribute.

    | in the text | in HTML |
    |---|---|
    | `<`, `>`, `&`, quotes | as what they are: no tag, no attribute |
    | controls, lone surrogates, marks of direction | their number, as `\\u202e` |
    | line breaks | as they are |
    | finished HTML | unchanged |
    """
    if isinstance(text, Markup):
        return text
    shown = (
        f"\\u{ord(one):04x}" if one != "\n" and unicodedata.category(one) in _HIDDEN else one
        for one in text
    )
    return Markup(html.escape("".join(shown)))


def joined(*parts: str) -> Markup:
    """Texts and HTML, one after another."""
    return Markup("".join(map(escaped, parts)))


def tag(_name: str, *inside: str, **attributes: str) -> Markup:
    """An element and what is inside: `class_` stands for `class`, `aria_label` for `aria-label`."""
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{_name}{named}>{joined(*inside)}</{_name}>")
