"""Prompts to sample a model's own text with, where a user brings none: varied, repeatable, in plain English.

Questions of many kinds about many things, and tasks over short passages (copy, correct, rewrite, extract),
since a head should also know how its target copies.
"""

import itertools
import json
import random
from pathlib import Path

TOPICS = (
    "volcanoes", "the French Revolution", "honey bees", "black holes", "bread", "chess", "the stock market",
    "coral reefs", "photosynthesis", "the Roman Empire", "electric cars", "migraines", "jazz",
    "the Great Wall of China", "inflation", "earthquakes", "the human heart", "solar panels", "democracy", "penguins",
    "the Silk Road", "vaccines", "gravity", "Python programming", "databases", "the Moon", "coffee",
    "marathon running", "the Amazon rainforest", "violins", "dinosaurs", "the internet", "sleep", "gardening",
    "the Olympic Games", "cheese", "glaciers", "robots", "dreams", "the Industrial Revolution", "whales",
    "mountain climbing", "photography", "the periodic table", "tea", "bicycles", "libraries", "the immune system",
    "rivers", "poetry", "deserts", "trains", "recycling", "the water cycle", "airplanes", "cats", "dogs",
    "mathematics", "the brain", "money", "friendship", "job interviews", "public speaking", "cooking rice",
    "learning a language", "saving money", "the ocean", "thunderstorms", "maps", "clocks", "elections", "nutrition",
    "astronomy", "viruses", "computer networks", "sorting algorithms", "prime numbers", "the Renaissance",
    "Shakespeare", "football", "swimming", "yoga", "time management", "remote work", "climate change",
    "ancient Egypt", "bridges", "batteries", "lasers", "birds", "trees", "the solar system", "DNA", "architecture",
    "museums", "city planning", "camping", "painting", "novels", "smartphones", "search engines", "encryption",
    "music theory", "the piano",
)  # fmt: skip
QUESTIONS = (
    "Explain {topic} to a child.", "What is the history of {topic}?", "Write a short poem about {topic}.",
    "Give me five facts about {topic}.", "Why does {topic} matter?", "Write a short story that involves {topic}.",
    "List three common mistakes people make about {topic}.",
    "Summarize what is known about {topic} in two sentences.",
    "What are the advantages and disadvantages of {topic}?", "Write a dialogue between two friends about {topic}.",
    "How would you explain {topic} to an expert in another field?", "Make a quiz with four questions about {topic}.",
    "Write an email to a colleague about {topic}.", "What should a beginner know about {topic}?",
    "Write a title and an outline for an essay on {topic}.", "Describe {topic} using a metaphor.",
    "What questions about {topic} are still open?", "Write a product description related to {topic}.",
    "Give step-by-step advice about {topic}.", "Write a news headline and a lead paragraph about {topic}.",
    "Compare {topic} today with {topic} a hundred years ago.", "Make a table of key terms about {topic}.",
    "Write a speech of one minute about {topic}.", "Write a haiku about {topic} and explain it.",
    "What is one surprising thing about {topic}, and why is it surprising?", "Tell me a joke about {topic}.",
    "Write a Python function whose example data is about {topic}.", "Write a JSON object that describes {topic}.",
    "Translate into Spanish: I read a book about {topic} yesterday.",
    "Write a letter from someone who loves {topic}.",
)  # fmt: skip
PASSAGES = (
    "The lighthouse keeper wrote the weather in a book every morning. On Monday the wind came from the north and "
    "the sea was grey. On Tuesday the wind came from the west and the sea was green.",
    "Our office moves to a new building on the first of May. Please pack your desk by Friday, label every box "
    "with your name and your new room number, and leave the boxes beside the door.",
    "def area(width, height):\n    return width * height\n\n\ndef perimeter(width, height):\n    return 2 * "
    "(width + height)",
    "Maria bought three apples, two pears and a loaf of bread. She gave one apple to her brother, who was "
    "waiting at the corner, and walked home through the park because the evening was warm.",
    "The meeting began at nine o'clock. Anna presented the budget, Peter asked about travel costs, and the group "
    "agreed to meet again in two weeks. Nobody had objections to the plan.",
    "Water is made of hydrogen and oxygen. It freezes at zero degrees Celsius and boils at one hundred. Ice is "
    "lighter than liquid water, which is why lakes freeze from the top.",
    "for name in names:\n    if name.startswith('A'):\n        print(name)\n    else:\n        "
    "skipped.append(name)",
    "The old train took four hours to cross the valley. It stopped at every village, and at each stop someone "
    "got on with a basket of cherries. By noon the whole carriage smelled of fruit.",
    "To reset the router, press the small button on its back for ten seconds. The light turns red, then green. "
    "After that, connect with the password that is printed on the label.",
    "The library opens at ten on weekdays and at noon on Saturdays. Members may borrow six books for four weeks. "
    "A book that is returned late costs fifty cents for each day.",
    '{"name": "Lina", "age": 31, "city": "Porto", "hobbies": ["sailing", "chess"], "email": "lina@example.org"}',
    "In autumn the geese fly south in long lines. They take turns at the front, where the air is hardest to push "
    "through, and they call to each other all night so that none is lost.",
)  # fmt: skip
TASKS = (
    "{passage}\n\nRepeat this text word for word.", "{passage}\n\nSummarize this in one sentence.",
    "{passage}\n\nRewrite this so that a child understands it.", "{passage}\n\nList the main points.",
    "{passage}\n\nQuote the first sentence, then the last.", "Copy the following exactly:\n\n{passage}",
    "{passage}\n\nRewrite this in a formal style.", "{passage}\n\nAdd one more sentence or line at the end.",
    "{passage}\n\nWhat is this about, and what happens?",
    "Correct any mistakes, changing as little as you can:\n\n{passage}",
    "{passage}\n\nReplace every number by another one and leave the rest as it is.",
    "{passage}\n\nAsk three questions about this and answer each with a quotation.",
)  # fmt: skip


def varied_prompts(seed: int) -> list[str]:
    """All of them in a random order, each once."""
    asked = [question.format(topic=topic) for question, topic in itertools.product(QUESTIONS, TOPICS)]
    asked += [task.format(passage=passage) for task, passage in itertools.product(TASKS, PASSAGES)]
    random.Random(seed).shuffle(asked)
    return asked


def read_prompts(path: Path) -> list[str]:
    """One prompt a line, as it is or as a JSON string. ValueError names a line that is neither."""
    prompts: list[str] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text.startswith('"'):
            try:
                text = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not a JSON string: {error}") from error
        if text:
            prompts.append(text)
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return list(dict.fromkeys(prompts))
