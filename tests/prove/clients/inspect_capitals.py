from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def capitals() -> Task:
    questions = {"Japan": "Tokyo", "France": "Paris"}
    samples = [
        Sample(input=f"What is the capital of {country}?", target=capital) for country, capital in questions.items()
    ]
    return Task(dataset=samples, solver=generate(), scorer=includes())
