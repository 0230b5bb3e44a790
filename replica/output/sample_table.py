"""One long table and short questions about it: the same beginning, other ends.

Thirty people who do not exist, the same on every machine: what `ask` and the demo send to show what a
shared prefix is worth. Plain text; knows no tokens and no model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

_NAMES = (
    "Amara Osei",
    "Bjorn Lindqvist",
    "Chiara Moretti",
    "Daniel Kowalski",
    "Elif Yilmaz",
    "Farid Haddad",
    "Grace Mbeki",
    "Hiroshi Tanaka",
    "Ingrid Solberg",
    "Jorge Castillo",
    "Katarina Novak",
    "Liam Gallagher",
    "Mei Zhang",
    "Nadia Petrova",
    "Oluwaseun Adeyemi",
    "Priya Raman",
    "Quentin Dubois",
    "Rosa Almeida",
    "Stefan Weber",
    "Thandiwe Nkosi",
    "Ursula Keller",
    "Victor Ionescu",
    "Wanjiru Kamau",
    "Ximena Torres",
    "Yusuf Demir",
    "Zofia Wisniewska",
    "Aroha Ngata",
    "Benedikt Huber",
    "Camila Rojas",
    "Dmitri Volkov",
)
_OCCUPATIONS = (
    "architect",
    "baker",
    "cartographer",
    "dentist",
    "electrician",
    "florist",
    "geologist",
    "historian",
    "interpreter",
    "joiner",
)
_COUNTRIES = (
    "Ghana",
    "Sweden",
    "Italy",
    "Poland",
    "Turkey",
    "Lebanon",
    "South Africa",
    "Japan",
    "Norway",
    "Mexico",
    "Slovenia",
    "Ireland",
    "Singapore",
    "Bulgaria",
    "Nigeria",
    "India",
    "France",
    "Portugal",
    "Germany",
    "Botswana",
    "Switzerland",
    "Romania",
    "Kenya",
    "Colombia",
    "Cyprus",
    "Austria",
    "New Zealand",
    "Liechtenstein",
    "Chile",
    "Latvia",
)
_STREETS = ("Harbour Street", "Mill Lane", "Station Road", "Orchard Way", "Chapel Hill", "Bridge Square")


@dataclass(frozen=True, slots=True)
class Person:
    """One row."""

    id: int
    name: str
    age: int
    occupation: str
    country: str
    email: str
    phone: str
    address: str


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask about the table, and what the table says."""

    text: str
    answer: str


def people() -> list[Person]:
    """The thirty rows."""
    return [_person(row, name) for row, name in enumerate(_NAMES)]


def people_table() -> str:
    """The rows as a Markdown table, about four thousand characters, ending in a newline."""
    columns = [each.name for each in fields(Person)]
    lines = [_line(columns), _line(["---"] * len(columns))]
    lines += [_line([str(getattr(person, column)) for column in columns]) for person in people()]
    return "\n".join(lines) + "\n"


def questions() -> list[Question]:
    """Ten questions with ten answers, in an order that never changes."""
    rows = people()
    by_column = (
        "age",
        "occupation",
        "country",
        "email",
        "phone",
        "address",
        "age",
        "occupation",
        "country",
        "id",
    )
    return [
        Question(f"What is the {column} of {person.name}?", str(getattr(person, column)))
        for column, person in zip(by_column, rows[1::3], strict=True)
    ]


def prompt(question: Question) -> str:
    """The table, then the question: everything before the question is the same for all of them."""
    return f"Here is a table of people.\n\n{people_table()}\n{question.text} Answer with the value only."


def _person(row: int, name: str) -> Person:
    first, last = name.lower().split()
    # Steps without a common factor with the lists' lengths, so that no two columns repeat together.
    return Person(
        id=1001 + 7 * row,
        name=name,
        age=22 + (row * 17) % 47,
        occupation=_OCCUPATIONS[(row * 3) % len(_OCCUPATIONS)],
        country=_COUNTRIES[row],
        email=f"{first}.{last}@example.com",
        phone=f"+1-202-555-{100 + (row * 37) % 100:04d}",
        address=f"{1 + (row * 29) % 97} {_STREETS[(row * 5) % len(_STREETS)]}",
    )


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
