"""Sixty JSON schemas of our own over the features of JSON Schema, each with what it is to describe."""

TEXT, WHOLE, NUMBER, YES = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
SHORT = {"type": "string", "maxLength": 24}


def thing(required: str = "*", **properties: object) -> dict:
    """A closed object; ``required`` names its required properties, * all."""
    names = list(properties) if required == "*" else required.split()
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def items(item: dict, least: int = 0, most: int = 4) -> dict:
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


def text(pattern: str) -> dict:
    return {"type": "string", "pattern": pattern}


def form(name: str) -> dict:
    return {"type": "string", "format": name}


NODE = thing("value", value={"type": "integer", "minimum": 0, "maximum": 9}, next={"$ref": "#/$defs/node"})
TREE = thing("name", name=SHORT, children=items({"$ref": "#"}, most=2))
CAT = thing(kind={"const": "cat"}, lives={"type": "integer", "minimum": 1, "maximum": 9})
DOG = thing(kind={"const": "dog"}, tricks=items(SHORT, most=2))

SCHEMAS: dict[str, dict] = {
    # types
    "the name of a city": thing(city=TEXT),
    "the age of a person in years": thing(age=WHOLE),
    "the weight of an apple in kilograms": thing(weight=NUMBER),
    "whether the sky is blue": thing(blue=YES),
    "nothing at all": thing(value={"type": "null"}),
    "a person who may have no phone": thing(name=SHORT, phone={"type": ["string", "null"], "maxLength": 12}),
    "a value that is a number or a word": {
        "type": ["integer", "string"],
        "maxLength": 10,
        "maximum": 1000,
        "minimum": 0,
    },
    "just true or false": YES,
    "just one word": {"type": "string", "minLength": 1, "maxLength": 12},
    "a number alone": {"type": "integer", "minimum": 1, "maximum": 100},
    # enum and const
    "a traffic light": thing(colour={"enum": ["red", "amber", "green"]}),
    "a mixed bag": thing(pick={"enum": [1, "two", None, True, 4.5]}),
    "a fixed answer": {"const": {"answer": 42, "unit": ["km", "h"]}},
    "a choice of objects": {"enum": [{"a": 1}, {"b": [2, 3]}, "neither"]},
    "a version": thing(version={"const": "1.0"}, stable=YES),
    "a word in another script": thing(word={"enum": ["日本", "ελληνικά", "naïve", "🙂"]}),
    # numbers with bounds
    "a percentage": thing(percent={"type": "integer", "minimum": 0, "maximum": 100}),
    "a temperature below zero": thing(celsius={"type": "integer", "minimum": -40, "exclusiveMaximum": 0}),
    "a probability": thing(p={"type": "number", "minimum": 0, "maximum": 1}),
    "a positive price": thing(price={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 100}),
    "a multiple of five": thing(n={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}),
    "coordinates": thing(
        lat={"type": "number", "minimum": -90, "maximum": 90}, lon={"type": "number", "minimum": -180, "maximum": 180}
    ),
    # strings
    "a name of bounded length": thing(name={"type": "string", "minLength": 3, "maxLength": 12}),
    "a postal code": thing(code=text("^[0-9]{5}$")),
    "a licence plate": thing(plate=text("^[A-Z]{1,3}-[A-Z]{1,2} [1-9][0-9]{0,3}$")),
    "a hex colour": thing(colour=text("^#[0-9a-f]{6}$")),
    "a lower-case slug": thing(slug=text("^[a-z]+(-[a-z]+){0,3}$")),
    "a date": thing(date=form("date")),
    "a time": thing(time=form("time")),
    "a moment": thing(at=form("date-time")),
    "an address on the internet": thing(ip=form("ipv4")),
    "an identifier": thing(id=form("uuid")),
    "an e-mail address": thing(mail=form("email") | {"maxLength": 40}),
    "a sentence with quotes": thing(quote={"type": "string", "maxLength": 60}),
    # arrays
    "three fruits": thing(fruits=items(SHORT, 3, 3)),
    "up to four numbers": items({"type": "integer", "minimum": 0, "maximum": 50}, 1, 4),
    "a pair of a name and an age": {"type": "array", "prefixItems": [SHORT, WHOLE], "items": False, "minItems": 2},
    "a matrix": items(items({"type": "integer", "minimum": 0, "maximum": 9}, 2, 2), 2, 2),
    "a list that may be empty": thing(tags=items(text("^[a-z]{1,8}$"), 0, 3)),
    "a list of objects": items(thing(name=SHORT, count={"type": "integer", "minimum": 0, "maximum": 99}), 1, 2),
    "a row that begins with a flag": {
        "type": "array",
        "prefixItems": [YES],
        "items": {"type": "integer", "minimum": 0, "maximum": 9},
        "maxItems": 4,
    },
    # objects
    "a person with an address": thing(name=SHORT, address=thing(street=SHORT, city=SHORT, code=text("^[0-9]{4,5}$"))),
    "a user with options": thing("id", id={"type": "integer", "minimum": 1, "maximum": 999}, nick=SHORT, admin=YES),
    "a book with an author": thing(
        "title author", title=SHORT, author=thing("last", first=SHORT, last=SHORT), year=WHOLE
    ),
    "an empty object": {"type": "object", "additionalProperties": False},
    "a map of scores": {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 10},
        "minProperties": 1,
        "maxProperties": 2,
    },
    "properties in another order of need": thing("c a", a=YES, b=YES, c=YES),
    "names with signs in them": thing(**{"first name": SHORT, "größe": YES, 'a"b': YES}),
    "a required name that is not described": {
        "type": "object",
        "properties": {"a": YES},
        "required": ["a", "b"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
    # combinations
    "a number or a word": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, SHORT]},
    "a cat or a dog": {"anyOf": [CAT, DOG]},
    "one animal of two": {"oneOf": [CAT, DOG]},
    "a shape": {
        "oneOf": [
            thing(shape={"const": "circle"}, radius={"type": "integer", "minimum": 1, "maximum": 9}),
            thing(shape={"const": "square"}, side={"type": "integer", "minimum": 1, "maximum": 9}),
        ]
    },
    "a name with an age": {
        "allOf": [
            {"type": "object", "properties": {"name": SHORT}, "required": ["name"]},
            {"properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}}, "required": ["age"]},
        ],
    },
    "a number in two bounds": {"allOf": [{"type": "integer", "minimum": 10}, {"maximum": 20}]},
    # references
    "two addresses": {
        **thing(home={"$ref": "#/$defs/a"}, work={"$ref": "#/$defs/a"}),
        "$defs": {"a": thing(city=SHORT)},
    },
    "a chain of nodes": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "a family tree": TREE,
    "a list of choices": {
        **items({"$ref": "#/$defs/choice"}, 1, 3),
        "$defs": {"choice": {"enum": ["yes", "no", "perhaps"]}},
    },
    "an order": {
        **thing(
            number=text("^A[0-9]{3}$"),
            lines=items({"$ref": "#/$defs/line"}, 1, 2),
            paid=YES,
            note={"anyOf": [SHORT, {"type": "null"}]},
        ),
        "$defs": {"line": thing(article=SHORT, count={"type": "integer", "minimum": 1, "maximum": 9}, price=NUMBER)},
    },
}
