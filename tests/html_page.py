# SPDX-License-Identifier: Apache-2.0
"""Elements and texts of a page."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """The elements that a browser would find in a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
