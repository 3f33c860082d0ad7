"""A taskset of ``verifiers``: make what a check fails for right."""

import verifiers.v1 as vf

__all__ = ["Sums"]
FILES = {
    "sums.py": b"def add(a, b):\n    return a - b\n",
    "check.py": b"from sums import add\n\nassert add(2, 3) == 5\nprint('good')\n",
}


class Repair(vf.Task[vf.TaskData, vf.State]):
    """Its files are in the directory of the rollout."""

    async def setup(self, trace, runtime):
        for name, content in FILES.items():
            await runtime.write(name, content)

    @vf.reward
    async def repaired(self, trace, runtime) -> float:
        return float((await runtime.run(["python3", "check.py"], {})).exit_code == 0)


class Sums(vf.Taskset[Repair]):
    """Two tasks."""

    def load(self):
        for name in ("one", "two"):
            yield Repair(vf.TaskData(name=name, prompt=f"check.py fails, {name}. Repair sums.py."))
