"""One rollout of an agent that is a Python function on the host. Run `make demo` first: it imports the image."""

import asyncio

from dayfly.job import evaluate


async def polite_agent(vm, task):
    """An agent gets the VM and the task; what it says does not count, what it leaves behind does."""
    print(task.instruction)
    await vm.exec(["/bin/sh", "-c", "echo 'hello, world' > /app/greeting.txt"])


record = asyncio.run(evaluate("examples/hello-task", polite_agent))
print(record.outcome, record.reward, record.isolation, record.verifier_class)
