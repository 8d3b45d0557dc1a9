# Sourced by the scripts: `setup EXTRA[,EXTRA]` makes .venv and installs into it. What was installed
# from the present pyproject.toml and constraints.txt is not installed again, so that later runs
# need no network.
setup() {
  local extras=$1 python=${PYTHON:-python3} stamp
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "graphwright needs Python 3.11 or later; set PYTHON to one." >&2
    return 2
  }
  stamp=.venv/.installed-${extras//,/-}-$(cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
  [ -e "$stamp" ] && return
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  echo "Installing into .venv, once: torch and its libraries. They are downloaded (where torch comes with"
  echo "CUDA some 3 GB, else about 0.4 GB), which takes minutes; nothing is shown meanwhile ..."
  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    -c constraints.txt -e ".[$extras]"
  touch "$stamp"
}
