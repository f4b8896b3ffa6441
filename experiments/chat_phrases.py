"""List the phrases that demo-chat's conversations are made of, and split them into training and held-out ones.

Braces are filled by `chat_exchanges`: numbers a, b, c; a value v with unit u and target t; functions f and g. Of every
group about one phrase in six is held out, by the SHA-256 of its text: no choice of ours, and the same everywhere.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache

HELD_OUT_ONE_IN = 6


@cache
def split(phrases: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the training phrases and the held-out phrases of a group, at least one of each.

    Arrangements are held out, not words: each word and punctuation mark of a held-out phrase occurs in a training
    phrase. Refusals are the exception: what is refused should be new to the model.
    """
    ranked = sorted(phrases, key=lambda phrase: hashlib.sha256(phrase.encode()).digest())
    held: list[str] = []
    for phrase in ranked:
        if len(held) == max(1, len(phrases) // HELD_OUT_ONE_IN):
            break
        others = [other for other in phrases if other not in (*held, phrase)]
        known = set().union(*map(words, others))
        if phrases is REFUSED or all(words(each) <= known for each in (*held, phrase)):
            held.append(phrase)
    return tuple(p for p in phrases if p not in held), tuple(p for p in phrases if p in held)


def words(phrase: str) -> set[str]:
    """Return the words and punctuation marks of a phrase, without its placeholders in braces."""
    return set(re.findall(r"\w+|[^\w\s]", re.sub(r"\{\w*\}", " ", phrase)))


# Arithmetic: an expression -> how people say it, put into a frame.
ARITHMETIC = {
    "{a} + {b}": (
        "{a} + {b}", "{a} plus {b}", "the sum of {a} and {b}", "{a} and {b} added together", "{a} added to {b}",
        "{a} increased by {b}", "the total of {a} and {b}", "{a} and {b} in total",
        "the result of {a} plus {b}", "the sum of the numbers {a} and {b}", "the result of {a} added to {b}",
    ),
    "{a} - {b}": (
        "{a} - {b}", "{a} minus {b}", "the difference between {a} and {b}", "{a} less {b}", "{a} decreased by {b}",
        "{a} reduced by {b}", "{a} with {b} taken away", "the difference of {a} and {b}", "the result of {a} minus {b}",
        "the difference between the numbers {a} and {b}", "the result of {a} less {b}", "the result of {a} - {b}",
    ),
    "{b} - {a}": ("{a} subtracted from {b}", "{a} taken from {b}", "{a} less than {b}", "{a} taken away from {b}"),
    "{a} * {b}": (
        "{a} * {b}", "{a} times {b}", "{a} x {b}", "the product of {a} and {b}", "{a} multiplied by {b}",
        "{a} and {b} multiplied together", "{a} multiplied with {b}", "the product of the numbers {a} and {b}",
        "the result of {a} times {b}", "the result of {a} x {b}", "the numbers {a} and {b} multiplied together",
    ),
    "{a} / {b}": (
        "{a} / {b}", "{a} divided by {b}", "{a} over {b}", "the quotient of {a} and {b}", "{a} shared between {b}",
        "{a} split by {b}", "the result of {a} divided by {b}", "the result of {a} over {b}", "the result of {a} / {b}",
        "the quotient of the numbers {a} and {b}",
    ),
    "{a} ** {s}": (
        "{a} ** {s}", "{a} ^ {s}", "{a} to the power {s}", "{a} to the power of {s}", "{a} raised to the power {s}",
    ),
    "{a} ** 2": ("{a} squared", "the square of {a}", "{a} to the square", "the square of the number {a}"),
    "{p} / 100 * {b}": ("{p}% of {b}", "{p} percent of {b}", "{p} per cent of {b}", "{p} % of {b}"),
    "{a} + {b} + {c}": (
        "{a} + {b} + {c}", "{a} plus {b} plus {c}", "the sum of {a}, {b} and {c}", "the total of {a}, {b} and {c}",
        "the sum of the numbers {a}, {b} and {c}", "the total of the numbers {a}, {b} and {c}",
        "the result of {a} plus {b} plus {c}", "the result of {a} + {b} + {c}",
    ),
    "{a} + {b} - {c}": (
        "{a} + {b} - {c}", "{a} plus {b} minus {c}", "the sum of {a} and {b}, less {c}",
        "the sum of {a} and {b}, minus {c}", "{a} plus {b}, minus {c}", "{a} plus {b}, less {c}",
    ),
    "{a} * {b} + {c}": ("{a} * {b} + {c}", "{a} times {b} plus {c}", "{a} x {b} + {c}", "{a} times {b}, plus {c}"),
    "({a} + {b}) * {c}": (
        "({a} + {b}) * {c}", "the sum of {a} and {b}, times {c}", "({a} + {b}) times {c}",
        "the sum of {a} and {b}, multiplied by {c}",
    ),
}  # fmt: skip
ASK = (
    "What is {}?", "How much is {}?", "Work out {}.", "Please calculate {}.", "I need {}.", "{}", "Can you compute {}?",
    "Tell me {}.", "{} = ?", "Give me {}, please.", "What do you get for {}?", "Calculate {}", "What does {} come to?",
    "Please work out {} for me.", "Compute {}.", "I want to know {}.", "Could you tell me {}?", "Find {}.",
)  # fmt: skip
TWO = (
    "What are {} and {}?", "Work out {} and {}.", "I need {} and also {}.", "Please give me {} and {}.",
    "Tell me {} and then {}.", "Calculate {}, and {}.", "How much is {}, and how much is {}?",
    "What are {} and also {}?", "Work out {} and then {}.", "I need {} and {}.", "Tell me {} and {}.",
    "Please calculate {} and {}.", "Please tell me {} and also {}.",
)  # fmt: skip
STORIES = {
    "{a} + {b}": (
        "{who} has {a} {things} and buys {b} more. How many {things} does {who} have?",
        "There are {a} {things} on the table and {b} in the box. How many {things} are there?",
        "{who} found {a} {things} yesterday and {b} today. How many is that?",
        "A shop sells {a} {things} in the morning and {b} in the evening. How many {things} does it sell?",
        "{who} has {a} {things} on the table and {b} more in the box. How many {things} are there?",
        "{who} buys {a} {things} in the morning and {b} more in the evening. How many {things} does {who} have?",
        "{who} sells {a} {things} yesterday and {b} today. How many {things} is that?",
        "{who} found {a} {things} in the morning and {b} in the evening. How many is that?",
    ),
    "{a} - {b}": (
        "{who} has {a} {things} and gives {b} away. How many are left?",
        "There were {a} {things} and {b} are gone. How many {things} are left?",
        "{who} had {a} {things} and lost {b}. How many {things} does {who} have now?",
        "Of {a} {things} {who} sells {b}. How many are left?",
        "{who} had {a} {things} and gives {b} away. How many {things} are left?",
        "There were {a} {things} and {who} sells {b}. How many {things} are left?",
        "Of {a} {things} {b} are gone. How many {things} are left now?",
        "{who} lost {b} of {a} {things}. How many {things} does {who} have now?",
    ),
    "{a} * {b}": (
        "There are {a} boxes with {b} {things} each. How many {things} is that?",
        "{who} buys {a} bags of {b} {things}. How many {things} does {who} have?",
        "Each of {a} people brings {b} {things}. How many {things} are there?",
        "{who} packs {b} {things} into each of {a} boxes. How many {things} is that in all?",
        "There are {a} bags with {b} {things} each. How many {things} are there in all?",
        "{who} packs {a} boxes with {b} {things} each. How many {things} is that?",
        "{who} buys {a} boxes of {b} {things}. How many {things} is that in all?",
        "{who} packs {b} {things} into each of {a} bags. How many {things} does {who} have?",
    ),
    "{a} / {b}": (
        "{a} {things} are shared equally by {b} people. How many does each get?",
        "{who} puts {a} {things} into {b} equal bags. How many {things} are in each?",
        "{b} people share {a} {things}. How many {things} does each get?",
        "{a} {things} go into {b} equal boxes. How many {things} are in a box?",
        "{who} puts {a} {things} into {b} equal boxes. How many {things} are in each?",
        "{b} people share {a} {things} equally. How many does each get?",
        "{a} {things} go into {b} equal bags. How many {things} are in each?",
        "{a} {things} are shared by {b} people. How many {things} does each get?",
    ),
}
WHO = ("Ada", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Lena", "Marco", "Nora")
THINGS = (
    "apples", "books", "coins", "cards", "eggs", "pens", "stones", "stamps", "keys", "plates", "cups", "tickets",
)  # fmt: skip

CONVERT = (
    "Convert {v} {u} to {t}.", "How many {t} are {v} {u}?", "What is {v} {u} in {t}?", "{v} {u} in {t}",
    "{v} {u} to {t}", "How many {t} are in {v} {u}?", "How many {t} make {v} {u}?", "Express {v} {u} in {t}.",
    "I have {v} {u}. How many {t} is that?", "Change {v} {u} into {t}, please.", "Please give me {v} {u} in {t}.",
    "Can you convert {v} {u} into {t}?", "Turn {v} {u} into {t}.", "{v} {u} = ? {t}", "{v} {u} are how many {t}?",
    "I need {v} {u} in {t}.", "Tell me how many {t} there are in {v} {u}.", "What are {v} {u} in {t}?",
)  # fmt: skip
CONVERT_TWO = (
    "How many {t} are {v} {u} and {w} {x}?", "What is {v} {u} and {w} {x} in {t}?",
    "Convert {v} {u} and {w} {x} to {t}.",
    "{v} {u} and {w} {x} in {t}", "Give me {v} {u} plus {w} {x} in {t}.", "How many {t} are in {v} {u} and {w} {x}?",
    "Express {v} {u} and {w} {x} in {t}.", "I have {v} {u} and {w} {x}. How many {t} is that?",
)  # fmt: skip
CONVERT_THEN = (
    "Convert {v} {u} to {t} and add {a}.", "What is {v} {u} in {t}, plus {a}?", "Take {v} {u} in {t} and add {a}.",
    "Turn {v} {u} into {t}, then add {a} to it.", "How many {t} are {v} {u}, with {a} more?",
    "{v} {u} in {t}, plus {a}",
)  # fmt: skip
THEN_CONVERT = (
    "Work out {}, then convert it from {u} to {t}.", "What is {} {u} in {t}?",
    "Calculate {} and convert it from {u} to {t}.",
    "Convert {} {u} to {t}.", "Take {}, in {u}, and give it in {t}.", "I need {} {u} in {t}.",
    "Work out {} and convert it from {u} to {t}.", "Calculate {}, then convert it from {u} to {t}.",
    "Take {} {u} and convert it to {t}.", "What is {}, in {u}, in {t}?", "I need {}, in {u}, in {t}.",
)  # fmt: skip

LOOKUP = (
    "What does {f} do?", "What is {f} for?", "Explain {f}.", "Look up {f}.", "Tell me about {f}.", "What is {f}?",
    "Show me the documentation of {f}.", "I forgot what {f} does.", "Documentation of {f}, please.", "{f}?",
    "Describe {f}.", "What can I use {f} for?", "Can you look up {f} for me?", "help({f})",
    "Please explain what {f} does.", "What do the docs say about {f}?", "Give me the documentation of {f}.",
    "What does the function {f} do?", "I want to know what {f} does.", "How does the documentation describe {f}?",
)  # fmt: skip
LOOKUP_TWO = (
    "What do {f} and {g} do?", "Look up {f} and {g}.", "Explain {f} and {g}.", "Tell me about {f} and {g}.",
    "What are {f} and {g} for?", "Documentation of {f} and {g}, please.",
    "Tell me what {f} and {g} do.", "Please explain {f} and {g}.", "Look up {f} and {g}, please.",
    "Explain {f} and {g}, please.", "Tell me about {f}, and about {g}.", "What does {f} do, and what does {g} do?",
)  # fmt: skip
NAMES = ("{}", "{}()", "`{}`", "`{}()`")  # how a function's name is written

# Follow-ups: what stays is taken from the turn before.
AND_IN = (
    "And in {t}?",
    "And how many {t}?",
    "What about {t}?",
    "In {t}?",
    "And what is that in {t}?",
    "Now in {t}, please.",
)
AND_VALUE = ("And {v} {u}?", "What about {v} {u}?", "Now {v} {u}.", "And for {v} {u}?", "The same for {v} {u}, please.")
AND_LOOKUP = ("And {f}?", "What about {f}?", "Now {f}.", "And what does {f} do?", "The same for {f}, please.")
AND_OPERATION = {
    "{r} + {a}": (
        "And plus {a}?",
        "Now add {a}.",
        "Add {a} to that.",
        "And {a} more?",
        "Plus {a}?",
        "Now plus {a}.",
        "And add {a}?",
        "Now add {a} more.",
        "Add {a}.",
    ),
    "{r} - {a}": (
        "And minus {a}?",
        "Now subtract {a}.",
        "Take {a} away from that.",
        "Now take away {a}.",
        "Minus {a}?",
        "Now minus {a}.",
        "And subtract {a}?",
        "Subtract {a} from that.",
        "Now take {a} away.",
    ),
    "{r} * {a}": ("And times {a}?", "Now multiply it by {a}.", "Multiply that by {a}.", "Times {a}?", "Now times {a}."),
    "{r} / {a}": (
        "And divided by {a}?",
        "Now divide it by {a}.",
        "Divide that by {a}.",
        "Divided by {a}?",
        "Divide it by {a}.",
        "Now divided by {a}.",
        "And divide it by {a}?",
    ),
}

# Talk, answered without tools: question phrases -> answer.
TALK = {
    "Hello! How can I help?": (
        "Hello", "Hi", "Hello!", "Good morning", "Hi there", "Hey", "Good evening!", "Hello there!", "Hey there",
    ),
    "You are welcome.": (
        "Thanks", "Thank you", "Thank you!", "Thanks a lot", "Great, thanks.", "Thanks, that helps.", "Many thanks!",
    ),
    "Goodbye!": ("Bye", "Goodbye", "Bye!", "See you", "Good night", "Goodbye then.", "See you later!"),
    "My name is {name}.": (
        "What is your name?", "Who are you?", "Tell me your name.", "What are you called?", "Your name?",
        "What should I call you?", "May I ask your name?", "Tell me what you are called.", "Who are you, please?",
        "What is your name, please?", "Please tell me your name.",
    ),
    "{can}": (
        "What can you do?", "How can you help me?", "What are you able to do?", "Tell me what you can do.",
        "What can I ask you?", "Which things can you do?", "What tools do you have?", "Help",
    ),
    "Hello {who}!": (
        "My name is {who}.", "I am {who}.", "You can call me {who}.", "I am called {who}.", "Call me {who}.",
    ),
    "{word}": (
        "Say {word}.", "Repeat {word}.", "Please say {word}.", "Say {word} again.", "Repeat this: {word}",
        "Write {word}.", "Just say {word}.",
    ),
}  # fmt: skip
RECALL = (
    "What is my name?", "Who am I?", "Do you know my name?", "What was my name?", "Tell me my name.",
    "What is my name again?", "Tell me who I am.", "Do you know who I am?", "Tell me what my name is.",
)  # fmt: skip
REFUSED = (
    "What is the weather in {place}?", "Write a poem about {thing}.", "Who is the president of {place}?",
    "Book a flight to {place}.", "Tell me a joke about {thing}.", "What is the news from {place}?",
    "Translate {thing} into French.", "Draw a picture of {thing}.", "Send an email to {who}.", "Delete my files.",
    "What is the price of {thing}?", "How do I cook {thing}?", "Sing a song about {thing}.", "Play some music.",
    "Open the door.", "Order {thing} for me.", "How old is {who}?", "Where is {place}?", "What time is it in {place}?",
    "Write a story about {who}.", "Should I buy {thing}?", "Who won the game in {place}?", "Call {who} for me.",
    "Show me a map of {place}.", "Find a hotel in {place}.", "What is the meaning of life?", "Is {place} a nice city?",
    "Give me a recipe with {thing}.", "Recommend a film about {thing}.", "Remind me to buy {thing}.",
    "What does {who} think of {thing}?", "Read my email.", "Turn on the light.", "How far is {place}?",
    "Which team does {who} like?", "Write a letter to {who}.",
)  # fmt: skip
PLACES = ("Paris", "London", "Berlin", "Rome", "Tokyo", "Madrid", "Vienna", "Cairo", "Boston", "Oslo", "Lima", "Prague")
GOODS = (
    "bread",
    "fish",
    "shoes",
    "a car",
    "a house",
    "flowers",
    "rice",
    "a bicycle",
    "coffee",
    "snow",
    "the sea",
    "cats",
)
WORDS = (
    "yes", "no", "red", "green", "blue", "one", "two", "open", "close", "stop", "start", "left", "right", "python",
    "hello world", "good luck", "never mind", "left and right", "one two three", "open the file", "black and white",
)  # fmt: skip

PERSONAS = (
    "You are a helpful assistant.", "You are an assistant.", "You help people.", "You are a careful assistant.",
    "You answer questions.", "Help the user.",
)  # fmt: skip
NAMED = ("You are {name}, an assistant.", "Your name is {name}.", "You are called {name}.", "You are {name}.")
ASSISTANTS = ("Otto", "Vera", "Max", "Ruby", "Iris", "Leo", "Mona", "Hugo", "Stella", "Paul", "Alice", "Robin")
BRIEF = (
    "Answer with the result alone.", "Give only the result.", "Answer with nothing but the result.",
    "Write the result and no more.", "Only the result, no sentence.",
)  # fmt: skip
