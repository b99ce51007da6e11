#!/bin/sh
# Create .venv (if it is not there) and install the package with the locked versions into it.
#
#     sh tools/setup_env.sh EXTRAS        e.g. test  or  test,browser
#
# PYTHON=/path/to/python chooses the interpreter. Everything pip says goes to .venv/install.log;
# when something is missing, one line says what.
set -u
extras=$1

say() {
    echo "amp-lab: $1" >&2
    exit 1
}

suits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

if ! suits .venv/bin/python; then
    found=
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if suits "$python"; then
            found=$python
            break
        fi
    done
    [ -n "$found" ] || say "needs Python 3.11, 3.12 or 3.13, and ${PYTHON:-python3} is $(${PYTHON:-python3} --version 2>&1 | head -n 1); install one, or name it: make lab PYTHON=/path/to/python3.12"
    echo "amp-lab: creating .venv with $("$found" --version)"
    "$found" -m venv --clear .venv || say "'$found -m venv' failed; on Debian and Ubuntu install the package python3-venv"
fi

echo "amp-lab: installing the locked packages (a few minutes the first time)"
if ! .venv/bin/python -m pip install --constraint requirements.lock --editable ".[$extras]" >.venv/install.log 2>&1; then
    if grep -q -i -E 'connection|network is unreachable|name resolution|getaddrinfo|timed out|from versions: none' .venv/install.log; then
        say "no network: the package index could not be reached; connect and run the same command again (details: .venv/install.log)"
    fi
    say "the installation failed: $(grep -i '^error' .venv/install.log | tail -n 1) (details: .venv/install.log)"
fi
