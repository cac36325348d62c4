"""The wordings of training's retrieval prompts. The evaluation words its own, and a test keeps the two apart."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attribute:
    """Something that a text states about a key.

    Attributes:
        noun: Its name, and `plural` the name of several.
        keys: Kinds of `keepsight.data_gen.words.MAKERS` that have it.
        values: Kinds that its value may be of.
    """

    noun: str
    plural: str
    keys: tuple[str, ...]
    values: tuple[str, ...]


ATTRIBUTES = (
    Attribute("access code", "access codes", ("place", "project", "device"), ("digits", "code", "mixed")),
    Attribute("number", "numbers", ("pair", "word", "person", "project"), ("digits",)),
    Attribute("lucky number", "lucky numbers", ("person", "pair", "word"), ("digits",)),
    Attribute("phone extension", "phone extensions", ("person", "place"), ("digits",)),
    Attribute("locker number", "locker numbers", ("person", "pair"), ("digits", "code")),
    Attribute("serial number", "serial numbers", ("device", "pair"), ("code", "digits", "mixed", "uuid")),
    Attribute("record id", "record ids", ("person", "order", "pair", "uuid"), ("uuid", "digits", "code")),
    Attribute("tracking number", "tracking numbers", ("order", "person"), ("digits", "code", "uuid")),
    Attribute("password", "passwords", ("person", "device", "place", "project"), ("pair", "mixed", "word")),
    Attribute("code word", "code words", ("project", "person", "place"), ("word", "pair", "city")),
    Attribute("contact person", "contact persons", ("project", "place", "order", "city"), ("person",)),
    Attribute("delivery date", "delivery dates", ("order", "project", "device"), ("date",)),
    Attribute("meeting place", "meeting places", ("project", "person"), ("city", "place")),
    Attribute("favorite dish", "favorite dishes", ("person",), ("food",)),
    Attribute("color", "colors", ("pair", "device", "place"), ("color",)),
    Attribute("price", "prices", ("device", "order", "pair"), ("price",)),
    Attribute("opening time", "opening times", ("place", "city"), ("time",)),
    Attribute("token", "tokens", ("uuid", "project", "device"), ("uuid", "mixed")),
)

STATEMENTS = (
    "The {noun} for {key} is {value}.",
    "The {noun} of {key} is {value}.",
    "{key} has the {noun} {value}.",
    "Please note that the {noun} for {key} is {value}.",
    "For {key}, the {noun} is {value}.",
    "{value} is the {noun} that belongs to {key}.",
    "Reminder: {key} was given the {noun} {value}.",
    "According to the file, {key} now has {value} as its {noun}.",
    "If anyone asks about {key}, the {noun} is {value}.",
    "We changed the {noun} of {key} to {value} last week.",
    "Do not forget: {value} is the {noun} of {key}.",
    "{noun} ({key}): {value}.",
    "{key} - {noun}: {value}.",
    "By the way, somebody wrote down {value} as the {noun} for {key}.",
    "It was agreed that {key} gets the {noun} {value}.",
    "One {noun} of {key} is this: {value}.",
)

ONE_VALUE = (
    "What is the {noun} for {key}?",
    "What is the {noun} of {key}?",
    "Which {noun} does {key} have?",
    "Find the {noun} of {key}.",
    "Tell me the {noun} that belongs to {key}.",
    "I need the {noun} for {key}. What is it?",
    "Look up {key} and give me the {noun}.",
    "Please return only the {noun} for {key}.",
    "Could you tell me which {noun} was given to {key}?",
    "Does the text mention a {noun} for {key}? If so, which one?",
    "{key}: what is the {noun}?",
    "Someone asked me about the {noun} for {key}. What should I reply?",
)

MANY_VALUES = (
    "What are all the {plural} for {key}?",
    "List every {noun} of {key}.",
    "Several {plural} are given for {key}. Write all of them down.",
    "Which {plural} does {key} have? Separate them with commas.",
    "Find each {noun} that belongs to {key} and list them one per line.",
)

MANY_KEYS = (
    "What are the {plural} for {keys}?",
    "Give me the {plural} of {keys}.",
    "I need the {plural} for the following: {keys}.",
    "For each of {keys}, write down the {noun}.",
    "Make a short list with the {plural} of {keys}.",
)

PREFIXES = (
    "The {noun} for {key} is",
    "The {noun} of {key} is",
    "Answer:",
    "{key} has the {noun}",
    "According to the text, the {noun} for {key} is",
    "It is",
)

INTRODUCTIONS = (
    "",
    "",
    "Read the following text. A question comes after it.",
    "Below is a long document. It holds a few facts that you will be asked about.",
    "Here are my notes.",
    "Keep this text in mind:",
    "Somewhere in this text there is a detail that matters to me.",
    "You are given a document. Use it, and nothing else, to answer.",
    "I am pasting a text below.",
    "Please go through the text carefully.",
    "Context:",
)

ANSWER_STYLES = (
    "",
    "",
    "",
    "Answer briefly.",
    "Reply with the answer only.",
    "Answer in one full sentence.",
    "Quote the sentence that says so.",
    "Say how you found it.",
    "If you are not sure, say so.",
)

FRAMES = (
    "{intro}\n\n{text}\n\n{question} {style}",
    "{intro}\n\n{text}\n\n{question} {style}",
    "{intro}\n\n{text}\n\nQuestion: {question} {style}\nAnswer:",
    '{intro}\n"""\n{text}\n"""\n{question} {style}',
    "{intro}\n<text>\n{text}\n</text>\n\n{question} {style}",
    "{question} {style}\n\n{text}",
    "{question} Look in this text. {style}\n---\n{text}\n---\n{question}",
    "{intro}\n\nDocument:\n{text}\n\nTask: {question} {style}",
)
