"""Imports an engine's own modules from a wheel, without the engine.

After open_wheel(path, real), `import` reads the modules in real from the wheel, without changes. Stubs replace all further modules of
the engine, and the large libraries in STUBBED. A stub accepts calls, subclasses, and use as a decorator or in an annotation, and has no
effect. The drivers call no code that needs a result of a stub.
"""
import importlib.abc
import importlib.util
import sys
import types
import zipfile

STUBBED = {"torch", "psutil", "urllib3", "PIL", "transformers", "requests", "cloudpickle", "fastapi", "aiohttp", "regex", "triton", "huggingface_hub", "uvloop", "uvicorn", "prometheus_client", "cachetools", "nvtx"}


class StubType(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = StubType(name, (Stub,), {})
        setattr(cls, name, value)
        return value

    def __call__(cls, *args, **kwargs):
        if cls.__dict__.get("__module__") != __name__:  # a class of the engine with a stub as a base class
            return super().__call__(*args, **kwargs)
        if len(args) == 1 and not kwargs and isinstance(args[0], (type, types.FunctionType)):
            return args[0]  # the stub is a decorator
        return Stub

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __getitem__(cls, key):
        return cls

    def __iter__(cls):
        return iter(())

    def __lt__(cls, other):
        return False

    __gt__ = __lt__


class Stub(metaclass=StubType):
    pass


class StubModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if any(f"{self.__name__}.{name}" in f.real for f in finders):
            return importlib.import_module(f"{self.__name__}.{name}")
        value = StubType(name, (Stub,), {"__module__": __name__})
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, path, real):
        self.wheel = zipfile.ZipFile(path)
        self.path = path
        self.files = set(self.wheel.namelist())
        self.package = next(name.split("/")[0] for name in self.files if name.split("/")[0] in ("vllm", "sglang", "lmcache"))
        self.real = {name for name in real if self.file(name)}

    def file(self, name):
        """Returns the file of a module in the wheel, or None."""
        base = name.replace(".", "/")
        return next((f for f in (base + ".py", base + "/__init__.py") if f in self.files), None)

    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top != self.package and top not in STUBBED:
            return None
        module = name in self.real and not self.file(name).endswith("/__init__.py")
        return importlib.util.spec_from_loader(name, self, is_package=not module)

    def create_module(self, spec):
        return None if spec.name in self.real else StubModule(spec.name)

    def exec_module(self, module):
        if module.__name__ in self.real:
            file = self.file(module.__name__)
            module.__file__ = f"{self.path}/{file}"
            exec(compile(self.wheel.read(file), module.__file__, "exec"), module.__dict__)


finder = None  # the Finder of the first wheel
finders = []


def open_wheel(path, real):
    global finder
    opened = Finder(path, real)
    finder = finder or opened
    finders.append(opened)
    sys.meta_path.insert(0, opened)
    return opened
