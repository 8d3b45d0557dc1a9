"""Errors of compilers and of the loader, as a sentence with the user's own line."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

from ...errors import ExtensionError, first_line
from .sources import OURS, REGISTRATION, Unit

# gcc and clang; then nvcc.
_ERRORS = (
    re.compile(r"^(?P<file>.+?):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<text>.+)$", re.M),
    re.compile(
        r'^"?(?P<file>[^"\n]+?)"?(?:\((?P<line>\d+)\)|, line (?P<other>\d+)): '
        r"(?:catastrophic )?error(?: #[\w-]+)?: (?P<text>.+)$",
        re.M,
    ),
)
_REGISTERED = re.compile(rf"{REGISTRATION}(\w+)")
_UNDEFINED = re.compile(r"undefined symbol: (\w+)")
# What PyTorch's headers say of types that no schema has.
_TYPE = re.compile(
    r"You tried to register a kernel with an unsupported (?P<what>[^.]+)\. "
    r"(?P<remedy>Please [^\n]+)"
)
# At our own part the compiler is still inside of the user's.
_OPEN = re.compile(r"expected unqualified-id before string constant|linkage specification", re.M)
_COMPILER_OPTION = re.compile(
    r"(unrecognized command[- ]line option|Unknown option|unknown argument|unsupported option)"
    r":? ?(?P<what>.*)"
)


def diagnosed(error: BaseException, unit: Unit, name: str) -> ExtensionError:
    """The error of a build as a sentence; with the lines of the user's source that it is about."""
    if isinstance(error, OSError):
        return not_loaded(error, unit, name)
    said = str(error)
    if "CUDA version" in said and "mismatch" in said:
        return ExtensionError(
            f"{name} cannot be built: {' '.join(said.split())[:300]}",
            remedy="Install the CUDA toolkit that PyTorch was built with, and name its folder in "
            "CUDA_HOME.",
        )
    found = _errors(said)
    own = [e for e in found if e[0] in unit.labels]
    function = next(iter(_REGISTERED.findall(said)), None)
    if own:
        return _in_source(own, unit, name)
    if any(file == OURS and line == 1 for file, line, _ in found) or _OPEN.search(said):
        return ExtensionError(
            f"The {unit.language} source of {name} ends before it is complete.",
            where=unit.labels[-1],
            remedy="Look for a brace that is not closed, or a semicolon that is missing.",
        )
    if "No space left on device" in said:
        return ExtensionError(
            f"{name} cannot be built: no space is left on the device.",
            remedy="Make room, or name another folder in GRAPHWRIGHT_CACHE_DIR.",
        )
    if function is not None:
        return _of_function(function, said, unit, name)
    return _outside(found, error, unit, name)


def _outside(
    found: Sequence[tuple[str, int, str]], error: BaseException, unit: Unit, name: str
) -> ExtensionError:
    """An error in what the user passes beside the source, or includes."""
    said = str(error)
    option = _COMPILER_OPTION.search(said)
    if option is not None:
        return ExtensionError(
            f"The compiler does not know an option that {name} passes: {option['what'].strip()}",
            remedy="Correct cflags, cuda_cflags or ldflags.",
        )
    if found:
        file, line, text = found[0]
        return ExtensionError(
            f"The {unit.language} source of {name} does not compile: {text}",
            where=f"{file}:{line}",
            remedy="The error is in a header: see what your source passes to it.",
        )
    link = re.search(r"(undefined reference to .+|cannot find -l\S+)", said)
    if link is not None:
        return ExtensionError(
            f"{name} cannot be linked: {link[1].rstrip(':')}.",
            remedy="Name the library that holds it in ldflags.",
        )
    return ExtensionError(
        f"{name} cannot be built: {first_line(error)}",
        remedy="Run it with verbose=True to see what the compiler is called with and says.",
    )


def not_loaded(error: OSError, unit: Unit, name: str) -> ExtensionError:
    """The error of a library that was built and cannot be loaded."""
    undefined = _UNDEFINED.search(f"{error}\n{error.__cause__ or error.__context__ or ''}")
    if undefined is None:
        return ExtensionError(
            f"The library of {name} cannot be loaded: {first_line(error)}",
            remedy="See whether the libraries that it is linked with are installed.",
        )
    return ExtensionError(
        f"The {unit.language} source of {name} uses {_plain(undefined[1])} and does not define it.",
        remedy="Define it, or name the library that holds it in ldflags.",
    )


def not_registered(said: str, unit: Unit, name: str) -> ExtensionError:
    """What PyTorch says of a function that is not what its schema says."""
    function = re.search(r"operator: \w+::(\w+)", said)
    inferred = re.search(r"inferred schema: (.+)", said)
    reason = re.search(r"reason: (.+)", said)
    if function is None or inferred is None:
        return ExtensionError(
            f"PyTorch does not register {name}: {' '.join(said.split())[:400]}",
            remedy="Compare the functions of the source with their schemas.",
        )
    given, arrow, returned = re.sub(r"\b_(\d+)\b", r"arg\1", inferred[1].strip()).partition("->")
    takes = given + arrow + re.sub(r" arg\d+", "", returned)
    why = f" ({reason[1].strip()})" if reason else ""
    return ExtensionError(
        f"{function[1]} in the {unit.language} source of {name} is not what its schema says{why}: "
        f"by its types it is {takes}",
        remedy="Let both say the same: Tensor is const at::Tensor&, int is int64_t, float is "
        "double, str is std::string_view, Tensor? is const std::optional<at::Tensor>&, Tensor[] "
        "is at::TensorList.",
    )


def _errors(said: str) -> list[tuple[str, int, str]]:
    """File, line and text of each error, in their order."""
    found = [match for pattern in _ERRORS for match in pattern.finditer(said)]
    found.sort(key=lambda match: match.start())
    return [
        (m["file"].strip(), int(m["line"] or m.groupdict().get("other") or 0), m["text"].strip())
        for m in found
    ]


def _in_source(own: list[tuple[str, int, str]], unit: Unit, name: str) -> ExtensionError:
    label, line, text = own[0]
    shown = [_shown(unit, *e) for e in own[:5]]
    more = f"\n  and {len(own) - 5} more" if len(own) > 5 else ""
    remedy = "\n".join(shown) + more
    header = re.search(r"(\S+): No such file or directory", text)
    if header is not None:
        remedy += f"\nName the folder of {header[1]} in include_dirs."
    return ExtensionError(
        f"The {unit.language} source of {name} does not compile: {text}",
        where=f"{label}:{line}",
        remedy=remedy,
    )


def _shown(unit: Unit, label: str, line: int, text: str) -> str:
    """An error with the line that it is about."""
    lines = unit.lines(label)
    code = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return f"  {line:>4} | {code}\n       {text}"


def _of_function(function: str, said: str, unit: Unit, name: str) -> ExtensionError:
    """An error where a function is registered."""
    unsupported = _TYPE.search(said)
    if unsupported is not None:
        return ExtensionError(
            f"{function} in the {unit.language} source of {name} has a type that no schema has: "
            f"an unsupported {unsupported['what']}.",
            remedy=unsupported["remedy"],
        )
    line = next((t for f, _, t in _errors(said) if f.startswith(REGISTRATION)), "")
    missing = re.search(
        r"(has not been declared|was not declared|no member named|undefined|has no member)", line
    )
    if missing is not None:
        return ExtensionError(
            f"functions names {function}, and the {unit.language} source of {name} has no such "
            "function.",
            remedy="Define it outside of namespaces, or name it as Function(symbol='space::name').",
        )
    return ExtensionError(
        f"{function} in the {unit.language} source of {name} cannot be registered: "
        f"{line or 'see the original error, which is the cause of this one'}",
        remedy="It has to be one plain function, neither a template nor overloaded, also by the C "
        "library's (put it in a namespace then, and pass symbol='space::name'), whose types are "
        "those of its schema.",
    )


def _plain(symbol: str) -> str:
    """A symbol of C++ as it was written."""
    tool = shutil.which("c++filt")
    if tool is None:
        return symbol
    done = subprocess.run([tool, symbol], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() or symbol
