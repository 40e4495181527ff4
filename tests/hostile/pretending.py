"""Programs that do not solve their task and try to be judged right, or to break their judge.

The task is a function `f` with `f(x) == 2 * x + 1`. A program that defines no `f` of its own gets
one that returns None. Each has a name.
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
    """Return a program whose function returns an instance of a subclass that equals everything."""
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
CHANNEL = """
import os, sys
PACKAGE = 'dllm_bench.benchmarks.sandbox.child.'
answer, codec = sys.modules[PACKAGE + 'answer'], sys.modules[PACKAGE + 'codec']
encode, write = codec.encode, os.write
NAMES = ['f', 'half', 'isclose']
def raw(*frames):
    for file in map(int, os.listdir('/proc/self/fd')):
        for data in frames if file > 2 else ():
            data = len(data).to_bytes(8, 'big') + data
            try:
                while data: data = data[write(file, data):]
            except OSError: pass
def frames(*values):
    raw(*map(encode, values))
def content(tag, data):
    return codec.HEAD.pack(tag, len(data)) + data
def members(tag, *parts):
    return codec.HEAD.pack(tag, len(parts)) + b''.join(parts)
def value(data):
    return members(b't', encode('value'), data)
"""
"""Helpers that a hostile program would write for itself: `frames` sends values, `raw` any bytes."""
PASSED = "('passed', '')"
SERVE = """
import marshal
frames(('ended', '', NAMES))
requests = []
for file in map(int, os.listdir('/proc/self/fd')):
    try:
        if file > 2: requests.append(open(file, 'rb', buffering=0, closefd=False))
    except OSError: pass
while True:
    for file in requests:
        try: head = file.read(8)
        except OSError: continue
        if not head: os._exit(0)
        name, calls = marshal.loads(answer.os.read(file.fileno(), 1 << 20))
        frames(*[%s for inputs in calls])
"""
FORGED = {
    "ending": f"answer.ending = answer.failure = lambda error: {PASSED}\nraise ValueError",
    "attempt": f"answer.attempt = lambda *args: {PASSED}",
    "send": "send = answer.send\n"
    "answer.send = lambda channel, v: send(channel, ('passed', '', NAMES)[: len(v)])",
    "encode": f"answer.encode = lambda v: encode({PASSED})",
    "encode after the load": "answer.encode = lambda v: encode(\n"
    f"    ('ended', '', NAMES) if len(v) == 3 else {PASSED})",
    "find": f"answer.find = lambda *args: (lambda *inputs: {PASSED})",
    "eval and exec": "import builtins\nbuiltins.eval = builtins.exec = lambda *args: True",
    "compile": "import builtins\nbuiltins.compile = lambda *args, **kwargs: 'True'",
    "words ahead of the load": f"frames(*[{PASSED}] * 20)",
    "load and words ahead": f"frames(('ended', '', NAMES), *[{PASSED}] * 20)",
    "load and values ahead": "frames(('ended', '', NAMES), *[('value', 7)] * 20)",
    "passed as the load": "frames(('passed', '', NAMES))",
    "words and a good exit": f"frames(('passed', '', NAMES), {PASSED}, {PASSED})\nos._exit(0)",
    "words during a call": f"def f(x):\n    frames({PASSED})",
    "values during a call": "def f(x):\n    frames(*[('value', True)] * 9)",
    "words by a thread": "import threading\ndef write():\n"
    f"    while True: frames({PASSED})\nthreading.Thread(target=write, daemon=True).start()",
    "words by another program": "for file in map(int, os.listdir('/proc/self/fd')):\n"
    "    try: os.set_inheritable(file, True)\n    except OSError: pass\n"
    f"data = encode({PASSED})\ndata = (len(data).to_bytes(8, 'big') + data) * 9\n"
    "os.execv(sys.executable, ['python', '-S', '-c', "
    "f'import os\\nfor n in range(3, 64):\\n  try: os.write(n, {data!r})\\n"
    "  except OSError: pass'])",
    "words by a signal": "import signal\n"
    f"signal.signal(signal.SIGALRM, lambda *args: frames({PASSED}))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)",
    "words by the collector": f"import gc\ngc.callbacks.append(lambda *args: frames({PASSED}))\n"
    "def f(x):\n    gc.collect()",
    "words by a finaliser": f"class Last:\n    def __del__(self): frames({PASSED})\n"
    "def f(x):\n    Last()",
    "words by a trace": f"def trace(*args):\n    frames({PASSED})\nsys.setprofile(trace)",
    "words at exit": f"import atexit\natexit.register(frames, {PASSED})\nsys.exit(0)",
    "a server of its own": SERVE % PASSED,
    "a server of guesses": SERVE % "('value', True)",
    "a server of failures": SERVE % "('judge_error', '')",
    "a word that is bytes": "answer.encode = lambda v: encode((b'passed', b'', NAMES)[: len(v)])",
    "a word in a list": "answer.encode = lambda v: encode(['value', 7])",
    "a word in a word": f"answer.attempt = lambda *args: ({PASSED}, {PASSED})",
    "a broken judge as a failure": "frames(('judge_error', 'no memory', NAMES))",
    "a time out as a failure": "answer.attempt = lambda *args: ('timeout', '')",
    "a channel for another": "files = [int(n) for n in os.listdir('/proc/self/fd') if int(n) > 2]\n"
    "for one in files:\n    for other in files:\n        try: os.dup2(one, other)\n"
    "        except OSError: pass",
}
"""What is made to say that all is well -> the program."""
SET = "members({tag}, *(encode(i * (2**61 - 1)) for i in range(200_000)))"
BREAKERS = {
    "a name of a number": "raw(value(members(b'q', encode('1e999999999'), encode(1))))",
    "a ratio of names": "raw(value(members(b'q', encode('1e999999999'), encode('7'))))",
    "a ratio of long numbers": "raw(value(members(b'q', encode(1 << 10**6), encode(3**10**6))))",
    "a ratio by zero": "raw(value(members(b'q', encode(1), encode(0))))",
    "equal hashes in a set": f"raw(value({SET.format(tag=repr(b'S'))}))",
    "equal hashes in a frozen set": f"raw(value({SET.format(tag=repr(b'z'))}))",
    "equal hashes in a dict": f"raw(value({SET.format(tag=repr(b'd'))}))",
    "five million members": "raw(value(codec.HEAD.pack(b'l', 5_000_000) + encode(1) * 5_000_000))",
    "five million members in pairs": "raw(value(codec.HEAD.pack(b'l', 2_500_000)\n"
    "    + (codec.HEAD.pack(b't', 1) + encode(None)) * 2_500_000))",
    "a number of a megabyte": "raw(value(encode(1 << (8 << 20))))",
    "a number that no float holds": "raw(value(encode(10**300_000)))",
    "deep": "raw(value(codec.HEAD.pack(b'l', 1) * 100_000 + encode(1)))",
    "deep enough": "raw(value(codec.HEAD.pack(b't', 1) * 190 + encode(1)))",
    "keys without a hash": "raw(value(members(b'd', encode([]), encode(1))))",
    "a key without a value": "raw(value(members(b'd', encode(1))))",
    "a set of lists": "raw(value(members(b'S', encode([1]))))",
    "a range of names": "raw(value(members(b'r', encode('a'), encode('b'), encode('c'))))",
    "an endless range": "raw(value(encode(range(10**100))))",
    "a detail of a megabyte": "frames(('failed', 1 << (8 << 20)))",
    "a detail of lines": "frames(('failed', '\\ud800\\n\\t\\x0b\\x85\\u2028end\\tpassed\\t'))",
    "a kind that is a list": "frames(([1], 'x'))",
    "no tuple": "frames(7)",
    "an empty frame": "raw(b'')",
    "an unknown tag": "raw(value(content(b'?', b'123')))",
    "a short float": "raw(value(content(b'f', b'1')))",
    "text that is none": "raw(value(content(b's', b'\\xff\\xfe')))",
    "fifty megabytes of text": "raw(value(content(b's', bytes(50 << 20))))",
    "a length without end": "for file in map(int, os.listdir('/proc/self/fd')):\n"
    "    try: write(file, b'\\xff' * 8) if file > 2 else 0\n    except OSError: pass",
    "a frame that stops": "for file in map(int, os.listdir('/proc/self/fd')):\n"
    "    try: write(file, (99).to_bytes(8, 'big')) if file > 2 else 0\n"
    "    except OSError: pass\nos._exit(0)",
}
"""What is sent in place of a result -> the statements that send it."""
NAMELESS = {
    "an integer for names": "frames(('ended', '', 7))",
    "integers for names": "frames(('ended', '', [1, 2]))",
    "names of a megabyte": "frames(('ended', '', [1 << (8 << 20)]))",
    "names without a list": "frames(('ended', '', {'f': 1}))",
    "a load that is deep": "raw(codec.HEAD.pack(b'l', 1) * 100_000)",
    "a load without end": "raw(codec.HEAD.pack(b'l', 5_000_000) + encode(None) * 5_000_000)",
}
"""What is sent in place of the word that the program has ended -> the program."""


def during_call(source: str) -> str:
    """Return a program that runs the statements when it is called."""
    return (
        "def f(x):\n    exec(SOURCE, globals())\n    import os\n    os._exit(0)\nSOURCE = "
        + repr(source)
    )


GROUPS = {
    "patches": PATCHES,
    "searches": SEARCHES,
    "channel": CHANNELS,
    "returns": RETURNS,
    "forged": {name: CHANNEL + source for name, source in FORGED.items()},
}
PROGRAMS: Mapping[str, str] = {
    f"{group}: {name}": source if "def f(" in source else source + WRONG
    for group, programs in GROUPS.items()
    for name, source in programs.items()
}
BREAKING: Mapping[str, str] = {
    **{name: CHANNEL + during_call(source) for name, source in BREAKERS.items()},
    **{name: CHANNEL + source + WRONG for name, source in NAMELESS.items()},
}
"""Programs that send what a judge might break over, which must be wrong, not without a grade."""
