"""Programs that do not solve their task and try to be judged right, or to break their judge.

The task is a function `f` with `f(x) == 2 * x + 1`. A program that defines no `f` of its own gets
one that returns None. Each has a name; `HARMFUL` ones may use up their time.
"""

from __future__ import annotations

from collections.abc import Mapping

WRONG = "\ndef f(x):\n    return None\n"
FRAMES = """
import sys
def up():
    frame = sys._getframe(1)
    while frame:
        yield frame
        frame = frame.f_back
"""
FILES = "import os\nfiles = [int(name) for name in os.listdir('/proc/self/fd')]\n"
EQUAL = """
    __hash__ = object.__hash__
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __le__(self, other): return True
    def __gt__(self, other): return True
    def __ge__(self, other): return True
    def __bool__(self): return True
    def __getattr__(self, name): return lambda *args: self
    def __rsub__(self, other): return 0
    def __sub__(self, other): return 0
    def __abs__(self): return 0
    def __float__(self): return 0.0
"""
ENCODED = "b'\\0\\0\\0\\0\\0\\0\\0\\x05N\\0\\0\\0\\0'"


def subclass(base: str, value: str) -> str:
    """A program whose function returns an instance of a subclass that equals everything."""
    return f"class Same({base}):{EQUAL}\ndef f(x):\n    return Same({value})\n"


PATCHES = {
    "bool": "import builtins\nbuiltins.bool = lambda *a: True",
    "enumerate": "import builtins\nbuiltins.enumerate = lambda *a: []",
    "zip": "import builtins\nbuiltins.zip = lambda *a, **k: []",
    "all": "import builtins\nbuiltins.all = lambda *a: True",
    "abs": "import builtins\nbuiltins.abs = lambda *a: 0",
    "len": "import builtins\nbuiltins.len = lambda *a: 0",
    "isinstance": "import builtins\nbuiltins.isinstance = lambda *a: True",
    "AssertionError": "import builtins\nbuiltins.AssertionError = SystemExit",
    "helper of the tests": "def half(x):\n    return 3.5",
    "import": "import builtins\nbuiltins.__import__ = lambda *a, **k: __builtins__",
    "import hooks": "import sys\nsys.meta_path[:] = sys.path_hooks[:] = []\nsys.modules.clear()",
    "math.isclose": "import math\nmath.isclose = lambda *a, **k: True",
    "numpy.allclose": "try:\n    import numpy\n    numpy.allclose = lambda *a, **k: True\n"
    "except ImportError:\n    pass",
    "json": "import json\njson.loads = json.dumps = lambda *a, **k: True",
    "marshal": "import marshal\nmarshal.loads = lambda *a: ('f', [])",
    "sys.stdout": "import sys\nsys.stdout = sys.stderr = None",
    "os.write": "import os\nos.write = lambda fd, data: len(data)",
    "codec": "import sys\nfor m in list(sys.modules.values()):\n"
    "    if hasattr(m, 'encode'): m.encode = lambda value: b'i\\0\\0\\0\\1\\7'\n"
    "    if hasattr(m, 'send'): m.send = lambda *a: None",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))",
    "settrace": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)",
    "monitoring": "import sys\nif hasattr(sys, 'monitoring'):\n"
    "    sys.monitoring.use_tool_id(0, 'x')\n"
    "    sys.monitoring.set_events(0, sys.monitoring.events.CALL)",
    "signal handlers": "import signal\nfor n in (2, 10, 14, 15, 24, 27):\n"
    "    signal.signal(n, lambda *a: None)",
    "excepthook": "import sys\nsys.excepthook = lambda *a: None",
}
"""What is replaced -> code that replaces it."""
SEARCHES = {
    "frames for a verdict": FRAMES + "for frame in up():\n"
    "    for name, value in list(frame.f_locals.items()):\n"
    "        if name in ('report', 'send') and callable(value):\n"
    "            for args in (('base', 'passed', ''), ('end', 'passed', '')):\n"
    "                try: value(*args)\n"
    "                except Exception: pass",
    "frames for cases": FRAMES + "def f(x):\n    for frame in up():\n"
    "        for name in ('want', 'cases', 'rule', 'expected', 'payload', 'order'):\n"
    "            if name in frame.f_locals: return frame.f_locals[name]",
    "frames for a rule": FRAMES + "for frame in up():\n    for space in (frame.f_globals,):\n"
    "        for name in ('RULES', 'equal', 'judge'):\n"
    "            if name in space: space[name] = lambda *a: True",
    "objects": "import gc\ndef f(x):\n    for found in gc.get_objects():\n"
    "        if type(found) is dict and 'payload' in found: return found['payload']",
    "stack of an error": "def f(x):\n    try: raise ValueError\n"
    "    except ValueError as error:\n        frame = error.__traceback__.tb_frame.f_back\n"
    "        return frame.f_locals.get('want', frame.f_locals)",
    "memory by ctypes": "import ctypes\ndef f(x):\n    return ctypes.string_at(id(x), 64)",
    "memory of the parent": "import os\ndef f(x):\n"
    "    return open(f'/proc/{os.getppid()}/mem', 'rb').read(8)",
    "files of the parent": "import os\ndef f(x):\n"
    "    return os.listdir(f'/proc/{os.getppid()}/fd')",
    "tracing the parent": "import ctypes, os\n"
    "assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0",
}
"""What is searched for -> the program."""
CHANNELS = {
    "drained": FILES + "for file in files:\n    try:\n"
    "        again = os.open(f'/proc/self/fd/{file}', os.O_RDONLY | os.O_NONBLOCK)\n"
    "        os.read(again, 1 << 16)\n    except OSError: pass",
    "written words": FILES + "for file in files:\n"
    "    try: os.write(file, b'0\\tbase\\tpassed\\t\\n0\\tend\\tpassed\\t\\n')\n"
    "    except OSError: pass",
    "written frames": FILES + "for file in files:\n"
    f"    try: os.write(file, {ENCODED} * 20)\n    except OSError: pass",
    "written by a thread": "import threading, time\n" + FILES + "def write():\n"
    "    while True:\n        for file in files[2:]:\n"
    "            try: os.write(file, b'end\\tpassed\\t\\n')\n            except OSError: pass\n"
    "threading.Thread(target=write, daemon=True).start()",
    "too long a frame": FILES + "for file in files:\n"
    "    try: os.write(file, b'\\0\\0\\0\\1' + b'\\xff' * 4)\n    except OSError: pass",
    "closed": "import os\nos.closerange(0, 4096)",
    "hostile value": FILES + "for file in files:\n"
    "    try: os.write(file, b'\\0\\0\\0\\0\\0\\0\\0\\5l\\xff\\xff\\xff\\xff')\n"
    "    except OSError: pass",
}
"""What is done to files that are open -> the program."""
RETURNS = {
    "equal object": subclass("object", ""),
    "equal int": subclass("int", "5"),
    "equal float": subclass("float", "5.5"),
    "equal str": subclass("str", "'7'"),
    "equal list": subclass("list", "[1]"),
    "equal tuple": subclass("tuple", "(1,)"),
    "equal dict": subclass("dict", "{1: 2}"),
    "name of another type": "class int(object):" + EQUAL + "\ndef f(x):\n    return int()\n",
    "message like a verdict": "def f(x):\n    raise AssertionError('end\\tpassed\\t')",
    "exception that is a verdict": "class passed(BaseException): args = ('passed', '')\n"
    "def f(x):\n    raise passed('passed', '')",
    "StopIteration": "def f(x):\n    raise StopIteration",
    "exit": "import os\ndef f(x):\n    os._exit(0)",
    "exit of the program": "import os\nos._exit(0)",
    "huge output": "def f(x):\n    print('x' * (1 << 24))\n    return 'x' * (1 << 24)",
    "endless generator": "def f(x):\n    while True: yield x",
    "endless nesting": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "recursion in a repr": "class R:\n    def __repr__(self): return repr(self)\n"
    "    __str__ = __repr__\nclass E(Exception):\n    __str__ = R.__repr__\n"
    "def f(x):\n    raise E",
    "iterator over a hostile object": "class R:\n    def __iter__(self): raise SystemExit(0)\n"
    "def f(x):\n    return R()",
    "a process of its own": "import os\nif os.fork(): os._exit(0)",
    "killing the judge": "import os\nos.kill(os.getppid(), 9)",
    "leaving the group": "import os\nos.setsid()",
    "living on": "import ctypes\nassert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0",
    "crash": "import ctypes\nctypes.string_at(0)",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
}
"""What a call or the program does -> the program."""
SLOW = {
    "sleeping call": "import time\ndef f(x):\n    time.sleep(30)",
    "sleeping program": "import time\ntime.sleep(30)",
    "busy call": "def f(x):\n    while True: pass",
    "busy call without its timer": "import signal, resource\n"
    "signal.setitimer(signal.ITIMER_PROF, 0)\n"
    "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\ndef f(x):\n    while True: pass",
    "many short sleeps": "import time\ndef f(x):\n    for _ in range(1000): time.sleep(0.02)",
}
"""What takes the time -> the program."""
GROUPS = {"patches": PATCHES, "searches": SEARCHES, "channel": CHANNELS, "returns": RETURNS}
PROGRAMS: Mapping[str, str] = {
    f"{group}: {name}": source if "def f(" in source else source + WRONG
    for group, programs in GROUPS.items()
    for name, source in programs.items()
}
