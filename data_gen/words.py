"""Words of which training prompts make their keys, values and stories. The evaluation has a list of its own."""

import random
import string
import uuid
from collections.abc import Callable


def _listed(text: str, separator: str = " ") -> tuple[str, ...]:
    return tuple(text.split(separator))


FIRST_NAMES = _listed(
    "Alice Amir Anna Arturo Beatriz Bela Camille Carlos Chen Clara Dario Deepa Dmitri Elena Elias Emeka Erik Esther "
    "Farid Fatima Felix Gabriela Giorgos Greta Hamid Hanna Haruto Ines Isaac Ivana Jonas Julia Kamal Karin Kenji Laila "
    "Leon Lucia Magnus Malik Maria Mateo Mei Milan Nadia Nina Noah Olga Omar Oscar Paula Pedro Priya Rafael Rosa Samir "
    "Sofia Stefan Tariq Teresa Tomas Ulla Viktor Wanda Yara Yusuf Zeynep"
)
LAST_NAMES = _listed(
    "Abara Almeida Andersen Baptiste Becker Castillo Chandra Dubois Eriksen Ferrari Fischer Garcia Haddad Hoffmann "
    "Ibarra Ivanov Jansen Kaya Kim Kovacs Larsen Lindqvist Lopez Mbeki Moreau Nakamura Novak Nowak Okafor Olsen Patel "
    "Petrov Quinn Rahman Romano Santos Schmidt Silva Singh Tanaka Torres Usman Varga Vega Weber Wong Yilmaz Zhang"
)
ADJECTIVES = _listed(
    "amber ancient autumn brisk bronze calm cedar clever coastal copper cosmic crimson crystal dusty eager early "
    "eastern emerald famous foggy frozen gentle golden granite green hidden hollow humble icy inner ivory jolly "
    "lunar marble mellow misty modern narrow noble northern olive orange outer pale patient polar proud purple "
    "quick royal rustic sandy scarlet silent silver smooth snowy solar southern steady summer swift tall tidal upper "
    "velvet violet western wooden"
)
NOUNS = _listed(
    "anchor antenna basket beacon blanket bottle bridge bucket cabin candle canyon carpet castle cellar chimney "
    "clock compass cottage curtain desert engine falcon feather ferry forest fountain garden glacier hammer harbor "
    "helmet hill island jacket kettle ladder lantern library lighthouse market meadow mirror mountain museum needle "
    "notebook ocean orchard oven palace pebble pencil piano pillow planet pocket quarry rabbit ribbon river rocket "
    "saddle sailboat shelter spoon stable statue telescope temple tower tractor tunnel umbrella valley village violin "
    "wagon waterfall whistle window"
)
CITIES = _listed(
    "Accra Athens Bergen Bogota Boston Busan Cairo Chennai Cusco Dakar Denver Dublin Genoa Graz Hanoi Havana Izmir "
    "Jakarta Kyoto Lagos Leeds Lima Lisbon Lyon Malaga Manila Nairobi Oslo Perth Porto Prague Quito Riga Seville Split "
    "Sydney Tallinn Tampa Tunis Turin Utrecht Valencia Vienna Warsaw Zagreb"
)
PLACES = _listed(
    "warehouse,boiler room,main gate,archive,parking garage,roof terrace,server room,guest house,workshop,greenhouse,"
    "staff kitchen,loading dock,reading room,storage unit,back office,music room,laboratory,conference hall,pump house",
    ",",
)
DEVICES = _listed(
    "printer,router,scanner,projector,thermostat,camera,laptop,sensor,freezer,elevator,vending machine", ","
)
JOBS = _listed(
    "nurse,carpenter,pilot,translator,baker,geologist,lawyer,violinist,plumber,bookkeeper,journalist,veterinarian,"
    "gardener,watchmaker,chemist,bus driver,librarian,photographer,tailor,mechanic,history teacher,chef",
    ",",
)
HOBBIES = _listed(
    "chess,rock climbing,pottery,birdwatching,salsa dancing,astronomy,baking bread,restoring bicycles,knitting,"
    "long-distance swimming,collecting stamps,playing the cello,writing poems,keeping bees,fishing,origami",
    ",",
)
PETS = _listed("parrot,tortoise,greyhound,hamster,goldfish,black cat,pony,gecko,shaggy sheepdog,pair of canaries", ",")
FOODS = _listed(
    "lentil soup,mushroom risotto,fish tacos,apple pie,dumplings,shakshuka,paella,ramen,falafel,pancakes", ","
)
COLORS = _listed("blue,dark red,turquoise,yellow,light grey,pink,navy,lime green,beige,magenta,black,white", ",")
DAYS = _listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _listed("January February March April May June July August September October November December")

Maker = Callable[[random.Random], str]


def _person(rng: random.Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def _digits(rng: random.Random) -> str:
    size = rng.choice((3, 4, 4, 5, 6, 6, 7, 7, 7, 8, 9, 10))
    return str(rng.randrange(10 ** (size - 1), 10**size))


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choices(string.ascii_uppercase, k=rng.randint(2, 3)))
    return f"{letters}-{rng.randrange(100, 100000)}"


def _mixed(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_letters + string.digits, k=rng.randint(6, 12)))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _pair(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def _date(rng: random.Random) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1950, 2030)}"


MAKERS: dict[str, Maker] = {
    "person": _person,
    "place": lambda rng: f"the {rng.choice(ADJECTIVES)} {rng.choice(PLACES)}",
    "project": lambda rng: f"Project {rng.choice(ADJECTIVES).title()} {rng.choice(NOUNS).title()}",
    "device": lambda rng: f"{rng.choice(DEVICES)} {rng.choice(string.ascii_uppercase)}{rng.randint(1, 99)}",
    "order": lambda rng: f"order {rng.randrange(1000, 1000000)}",
    "word": lambda rng: rng.choice(NOUNS),
    "pair": _pair,
    "city": lambda rng: rng.choice(CITIES),
    "color": lambda rng: rng.choice(COLORS),
    "food": lambda rng: rng.choice(FOODS),
    "digits": _digits,
    "code": _code,
    "mixed": _mixed,
    "uuid": _uuid,
    "date": _date,
    "time": lambda rng: f"{rng.randint(0, 23):02}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02}",
    "price": lambda rng: f"${rng.randrange(1, 9000)}.{rng.randrange(100):02}",
}
"""How a key or a value of each kind is drawn."""


def distinct(kind: str, count: int, rng: random.Random) -> list[str]:
    """`count` different strings of a kind; a number is appended where the kind's words run out."""
    drawn: dict[str, None] = {}
    for attempt in range(20 * count):
        text = MAKERS[kind](rng)
        drawn[text if attempt < 10 * count else f"{text} {attempt}"] = None
        if len(drawn) == count:
            break
    return list(drawn)
