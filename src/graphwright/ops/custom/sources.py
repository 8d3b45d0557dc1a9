"""The user's C++ and CUDA as one translation unit that can register its functions.

Nothing registers itself when the library is loaded. A call of `graphwright_register` puts its
functions under their names, and returns errors as text. The user's files are included, so that the
compiler finds their headers and names their lines as usual.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ExtensionError, OptionError

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_FILES = (".cpp", ".cc", ".cxx", ".c", ".C", ".cu", ".cuh", ".h", ".hpp")
# It would be run when the library is loaded, and an error would end the process.
_REGISTERS = re.compile(r"^\s*(TORCH_LIBRARY\w*|STABLE_TORCH_LIBRARY\w*)\s*\(", re.M)
# What the compiler calls the place where a function is registered, and what comes after it.
REGISTRATION, OURS = "registration of ", "graphwright"

_END = """
#line 1 "{ours}"
#include <torch/library.h>
#include <memory>
#include <string>
#include <vector>
static std::vector<std::unique_ptr<torch::Library>> graphwright_libraries;
extern "C" __attribute__((visibility("default")))
const char* graphwright_register(const char* space, const char* suffix) {{
  static std::string message;
  try {{
    graphwright_libraries.push_back(std::make_unique<torch::Library>(
        torch::Library::IMPL, space, c10::DispatchKey::{key}, "graphwright", 1));
{registrations}
    return nullptr;
  }} catch (const c10::Error& error) {{
    message = error.what_without_backtrace();
  }} catch (const std::exception& error) {{
    message = error.what();
  }}
  graphwright_libraries.pop_back();
  return message.c_str();
}}
extern "C" __attribute__((visibility("default")))
void graphwright_take_back() {{
  graphwright_libraries.pop_back();
}}
"""


@dataclass(frozen=True)
class Unit:
    """A translation unit.

    Attributes:
        language: "C++" or "CUDA".
        text: all of it, but for the files that it includes.
        labels: what its parts are called where the compiler names a line: files, or what they are.
        folders: where headers are looked for.
        digests: of the files.
    """

    language: str
    text: str
    labels: tuple[str, ...]
    folders: tuple[str, ...]
    digests: tuple[str, ...]

    def lines(self, label: str) -> list[str]:
        """The lines of one of its parts."""
        begin = f'#line 1 "{_quoted(label)}"\n'
        if begin not in self.text:
            return Path(label).read_text(encoding="utf-8", errors="replace").splitlines()
        rest = self.text.partition(begin)[2]
        return re.split(r'^#line 1 "', rest, maxsplit=1, flags=re.M)[0].splitlines()


def unit(
    language: str,
    source: Source,
    name: str,
    symbols: Mapping[str, str],
    include_dirs: Iterable[str | os.PathLike[str]],
) -> Unit:
    """Put sources together.

    Args:
        language: "C++" or "CUDA".
        source: a text, a file, or several of them in order.
        name: of the extension.
        symbols: the functions of C++ to register, by the name of the operator.
        include_dirs: where headers are looked for besides the folders of the files.

    Raises:
        ExtensionError: a file cannot be read.
        OptionError: there is no source.
    """
    parts = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not parts:
        raise OptionError(f"The {language} source of {name} is empty.", remedy="Leave it out.")
    texts, labels, digests = [], [], []
    for number, part in enumerate(parts, 1):
        if isinstance(part, str) and not _is_file(part):
            text, label = part, f"{language} of {name}"
            if len(parts) > 1:
                label += f", part {number}"
            texts.append(f'#line 1 "{_quoted(label)}"\n{text}\n')
        else:
            path = Path(part).absolute()
            text, label = _read(path, language), str(path)
            digests.append(hashlib.sha256(text.encode()).hexdigest())
            texts.append(f'#include "{_quoted(label)}"\n')
        if not text.strip():
            raise OptionError(f"The {language} source of {name} is empty.", remedy="Leave it out.")
        registers = _REGISTERS.search(text)
        if registers is not None:
            raise ExtensionError(
                f"The {language} source of {name} registers operators itself, by {registers[1]}.",
                where=f"{label}:{text.count(chr(10), 0, registers.start(1)) + 1}",
                remedy="Take that out: extension() registers what `functions` names.",
            )
        labels.append(label)
    registrations = "\n".join(
        f'#line 1 "{REGISTRATION}{operator}"\n'
        f'    graphwright_libraries.back()->impl((std::string("{operator}") + suffix).c_str(), '
        f"TORCH_FN(::{symbol}));"
        for operator, symbol in symbols.items()
    )
    key = "CPU" if language == "C++" else "CUDA"
    text = "".join(texts) + _END.format(ours=OURS, key=key, registrations=registrations)
    folders = tuple(str(Path(folder).absolute()) for folder in include_dirs)
    return Unit(language, text, tuple(labels), folders, tuple(digests))


def _is_file(text: str) -> bool:
    if "\n" in text:
        return False
    return text.rstrip().endswith(_FILES) or (len(text) < 1000 and Path(text).is_file())


def _read(path: Path, language: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExtensionError(
            f"The {language} source {path} cannot be read: {getattr(error, 'strerror', error)}.",
            remedy="Pass the path of a file, or the source itself as a text of several lines.",
        ) from error


def _quoted(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"')
