# Sourced by the scripts that measure: sets `python` to the interpreter, and puts src on its path.
python=${PYTHON:-python3}
[ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ] && python=.venv/bin/python
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
# Containers often forbid bytecode, and come with none: each process would compile all of PyTorch's
# sources, which takes seconds. So it is kept in a folder of its own.
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
  unset PYTHONDONTWRITEBYTECODE
  : "${PYTHONPYCACHEPREFIX:=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/graphwright/bytecode}"
  export PYTHONPYCACHEPREFIX
fi
