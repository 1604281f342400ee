"""A site that loads nothing from elsewhere: checked.py SITE. Exit status 1 if it would."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ELSEWHERE = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(https?://[^\"'>\s]+)[^>]*>", re.IGNORECASE
)
FINE = ("canonical",)


def main() -> int:
    site, wrong = Path(sys.argv[1]), []
    for page in sorted(site.rglob("*.html")):
        for found in ELSEWHERE.finditer(page.read_text(encoding="utf-8")):
            if not any(word in found[0] for word in FINE):
                wrong.append(f"{page.relative_to(site)}: {found[1]}")
    print("\n".join(wrong) or f"{len(list(site.rglob('*.html')))} pages, and nothing that they load is elsewhere")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
