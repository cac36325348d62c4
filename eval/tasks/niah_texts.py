"""What needle-in-a-haystack says: its needles and questions, as RULER words them (arXiv:2404.06654), and its keys."""

ADJECTIVES = (
    *("abundant", "adorable", "blissful", "bouncy", "candid", "cheerful", "chubby", "clumsy", "cozy", "cranky"),
    *("dapper", "dizzy", "drowsy", "elastic", "elegant", "fancy", "fearless", "feisty", "fluffy", "frugal"),
    *("fuzzy", "giddy", "glossy", "graceful", "grumpy", "hasty", "honest", "jittery", "keen", "lanky"),
    *("lavish", "loyal", "lucid", "mighty", "nimble", "obedient", "peppy", "plucky", "polite", "quirky"),
    *("robust", "rowdy", "sassy", "shiny", "sincere", "sleepy", "spicy", "stubborn", "sturdy", "tangy"),
    *("thrifty", "timid", "upbeat", "vivid", "wacky", "witty", "zany", "zesty"),
)
NOUNS = (
    *("abacus", "accordion", "acorn", "almanac", "armchair", "badger", "bagpipe", "banjo", "biscuit", "blueberry"),
    *("boomerang", "buffalo", "cactus", "caravan", "cardigan", "catapult", "chandelier", "chipmunk", "cinnamon"),
    *("clarinet", "coconut", "cricket", "cupcake", "dolphin", "doorbell", "dragonfly", "eggplant", "flamingo"),
    *("flannel", "gazebo", "gondola", "grapefruit", "hedgehog", "igloo", "jigsaw", "kangaroo", "kayak", "koala"),
    *("lobster", "mandolin", "mango", "marmalade", "mosaic", "narwhal", "nutmeg", "ostrich", "parsnip", "pelican"),
    *("pineapple", "porcupine", "pretzel", "pumpkin", "raccoon", "radish", "scooter", "spatula", "squirrel"),
    *("tambourine", "toaster", "toboggan", "trombone", "turnip", "walnut", "walrus", "yogurt", "zeppelin"),
)

NEEDLE = "One of the special magic numbers for {key} is: {value}."
ONE = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.\n{text}\nWhat is the special magic number for {keys} mentioned in the provided text?"
)
SOME = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the numbers afterwards.\n{text}\nWhat are all the special magic numbers for {keys} mentioned in the provided text?"
)
ONE_PREFIX = "The special magic number for {keys} mentioned in the provided text is"
SOME_PREFIX = "The special magic numbers for {keys} mentioned in the provided text are"
