"""The user's C++ and CUDA as one translation unit that can register its functions.

Nothing registers itself when the library is loaded: what it holds is put under a name by a call of
`graphwright_register`, which gives errors back as text, and taken away again by another one. So a
source that has changed can take the place of what was there before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ExtensionError, OptionError

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_FILES = (".cpp", ".cc", ".cxx", ".c", ".cu", ".cuh", ".h", ".hpp")
# What the compiler calls the place where a function is registered.
REGISTRATION = "registration of "

_END = """
#line 1 "graphwright"
#include <torch/library.h>
#include <cstring>
#include <memory>
static std::unique_ptr<torch::Library> graphwright_library;
extern "C" __attribute__((visibility("default")))
const char* graphwright_register(const char* space) {{
  static std::string message;
  try {{
    graphwright_library = std::make_unique<torch::Library>(
        torch::Library::IMPL, space, c10::DispatchKey::{key}, "graphwright", 1);
{registrations}
    return nullptr;
  }} catch (const c10::Error& error) {{
    message = error.what_without_backtrace();
  }} catch (const std::exception& error) {{
    message = error.what();
  }}
  graphwright_library.reset();
  return message.c_str();
}}
extern "C" __attribute__((visibility("default")))
void graphwright_unregister() {{
  graphwright_library.reset();
}}
"""


@dataclass(frozen=True)
class Unit:
    """A translation unit.

    Attributes:
        language: "C++" or "CUDA".
        text: all of it.
        labels: what its parts are called where the compiler names a line: files, or what they are.
        folders: where its own headers are looked for.
        headers: texts of these, by path.
    """

    language: str
    text: str
    labels: tuple[str, ...]
    folders: tuple[str, ...]
    headers: tuple[tuple[str, str], ...]

    @property
    def key(self) -> str:
        """The dispatch key that its functions are registered for."""
        return "CPU" if self.language == "C++" else "CUDA"


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
    texts, labels, folders = [], [], [str(Path(f).resolve()) for f in include_dirs]
    for number, part in enumerate(parts, 1):
        if isinstance(part, str) and not _is_file(part):
            text, label = part, f"{language} of {name}"
            if len(parts) > 1:
                label += f", part {number}"
        else:
            path = Path(part)
            text, label = _read(path, language), str(path)
            folders.append(str(path.resolve().parent))
        if not text.strip():
            raise OptionError(f"The {language} source of {name} is empty.", remedy="Leave it out.")
        labels.append(label)
        texts.append(f'#line 1 "{_quoted(label)}"\n{text}\n')
    found = dict.fromkeys(folders)
    registrations = "\n".join(
        f'#line 1 "{REGISTRATION}{operator}"\n'
        f'    graphwright_library->impl("{operator}", TORCH_FN(::{symbol}));'
        for operator, symbol in symbols.items()
    )
    key = "CPU" if language == "C++" else "CUDA"
    text = "".join(texts) + _END.format(key=key, registrations=registrations)
    return Unit(
        language, text, tuple(labels), tuple(found), tuple(_headers("\n".join(texts), found))
    )


def _is_file(text: str) -> bool:
    return "\n" not in text and text.rstrip().endswith(_FILES)


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


def _headers(text: str, folders: Iterable[str]) -> list[tuple[str, str]]:
    """Headers of the user's own, and what these include in turn."""
    found: dict[str, str] = {}
    waiting = [(name, list(folders)) for name in _INCLUDE.findall(text)]
    while waiting:
        name, where = waiting.pop()
        path = next((p for f in where if (p := Path(f, name)).is_file()), None)
        if path is None or str(path.resolve()) in found:
            continue  # The compiler tells of what is not there.
        content = path.read_text(encoding="utf-8", errors="replace")
        found[str(path.resolve())] = content
        nearby = [str(path.resolve().parent), *folders]
        waiting += [(other, nearby) for other in _INCLUDE.findall(content)]
    return sorted(found.items())
