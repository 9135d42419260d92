"""Compare the versions in the repository with a tag, and print the notes of a version.

python3 .github/release.py check v0.1.0
python3 .github/release.py notes v0.1.0
"""

import re
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def find_versions() -> dict[str, str]:
    "Return the version that each file gives as the newest."
    ini = ConfigParser(interpolation=None)
    ini.read(ROOT / 'settings.ini', encoding='utf-8')
    citation = (ROOT / 'CITATION.cff').read_text('utf-8')
    changelog = (ROOT / 'CHANGELOG.md').read_text('utf-8')
    return {
        'settings.ini': ini['DEFAULT']['version'],
        'CITATION.cff': re.findall(r'^version: (.+)$', citation, re.M)[0],
        'CHANGELOG.md': re.findall(r'^## (\S+)', changelog, re.M)[0],
    }


def find_notes(version: str) -> str:
    "Return the section of CHANGELOG.md about a version, without its heading."
    changelog = (ROOT / 'CHANGELOG.md').read_text('utf-8')
    sections = re.split(r'^## ', changelog, flags=re.M)[1:]
    for section in sections:
        heading, _, text = section.partition('\n')
        if heading.split()[0] == version:
            return text.strip()
    sys.exit(f'CHANGELOG.md has no section {version}.')


def main(command: str, tag: str) -> None:
    version = tag.removeprefix('v')
    if command == 'notes':
        print(find_notes(version))
        return
    wrong = {file: found for file, found in find_versions().items() if found != version}
    if wrong:
        sys.exit(f'The tag is {tag}, but: {wrong}')


if __name__ == '__main__':
    main(*sys.argv[1:])
