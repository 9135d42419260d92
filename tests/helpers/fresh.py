"""Run code in a process that has imported only torch, forked from a waiting process."""

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
# what torch imports for the first optimizer, in a second or more: to be given as `has` for code that trains
OPTIMIZER_MODULES = ('torch._dynamo',)

# A child ends as an interpreter does: it waits for threads, and runs what `atexit` has. It leaves out to free torch's
# modules, which takes half a second.
PARENT = """
import atexit, os, sys, threading, traceback
for name in sys.argv[1:]:
    __import__(name)

def serve():
    while line := sys.stdin.readline():
        if not (pid := os.fork()):
            return line
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)

def become_main(line):
    import json, signal, types
    job = json.loads(line)
    signal.alarm(job['timeout_s'])
    os.chdir(job['cwd'])
    os.environ.clear()
    os.environ.update(job['env'])
    for fd, path in enumerate(job['streams']):
        file = os.open(path, os.O_RDWR | os.O_APPEND)
        os.dup2(file, fd)
        os.close(file)
    for fd, name in enumerate(('stdin', 'stdout', 'stderr')):
        buffering = 1 if os.isatty(fd) or name == 'stderr' else -1
        stream = open(fd, 'w' if fd else 'r', buffering, 'utf-8', closefd=False)
        setattr(sys, name, stream)
        setattr(sys, '__' + name + '__', stream)
    sys.argv = ['-c', *job['arguments']]
    sys.modules['__main__'] = main = types.ModuleType('__main__')
    return compile(job['code'], '<string>', 'exec'), main.__dict__

def live(code, names):
    try:
        exec(code, names)
    except SystemExit as e:
        return e.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

code = live(*become_main(serve()))
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(code)
"""


@cache
def _waiting(*modules: str) -> subprocess.Popen[str]:
    "Start the process with the imported modules, once; warnings are errors in it and its children."
    command = [sys.executable, '-W', 'error', '-c', PARENT, *modules]
    parent = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {'PYTHONPATH': str(ROOT)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )

    def stop() -> None:
        with parent:
            parent.kill()

    atexit.register(stop)
    return parent


def run_fresh(
    code: str,
    *arguments: object,  # `sys.argv[1:]`
    cwd: Path = ROOT,
    env: Mapping[str, str] = os.environ,
    terminal: str = '',  # the path of one that the process writes to and reads from
    has: tuple[str, ...] = ('torch',),  # what is imported before
    timeout_s: int = 600,  # SIGALRM ends it then
) -> CompletedProcess[str]:
    "Run code as `python -W error -c` does; return its exit code and its output."
    parent = _waiting(*has)
    assert parent.stdin is not None and parent.stdout is not None
    with TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ('stdout', 'stderr')]
        for file in files:
            file.touch()
        streams = [terminal] * 3 if terminal else [os.devnull, *map(str, files)]
        job = {
            'code': code,
            'arguments': [*map(str, arguments)],
            'cwd': str(cwd),
            'env': {'PYTHONPATH': str(ROOT), **env},
            'streams': streams,
            'timeout_s': timeout_s,
        }
        print(json.dumps(job), file=parent.stdin, flush=True)
        exit_code = int(parent.stdout.readline())
        stdout, stderr = (file.read_text('utf-8') for file in files)
    return CompletedProcess(code, exit_code, stdout, stderr)


def output_of(code: str, *arguments: object, **options: object) -> str:
    "Run code as `run_fresh` does, require that it succeeds, and return its output."
    done = run_fresh(code, *arguments, **options)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
