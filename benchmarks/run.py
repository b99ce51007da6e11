"""Run every benchmark beside this file, one after the other: `make bench`.

Each prints one table in which our code and its peers were measured side by side in one run. Times
are this machine's; the ratios are what to compare.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent


def main() -> int:
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, accelerator: {accelerator}"
    )
    failed = []
    for path in sorted(HERE.glob("bench_*.py")):
        print(f"\n== {path.stem.removeprefix('bench_')}", flush=True)
        if subprocess.run([sys.executable, path], check=False).returncode:
            failed.append(path.name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
