"""Measures answers from documents as people have them: a handbook with lists and a table, a manual, minutes, a letter,
a price list, a recipe; with questions that they answer and others that they do not. All of it was written for this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrieval import Library, Query, sources
from retrieval.embedding import Embedder
from retrieval.jobs import Given
from retrieval.query_rewriting import resolve
from retrieval.sentence_ranking import ANSWERS, with_context

HANDBOOK = """# Handbook of the Larkfield Library

## Opening hours

Monday to Thursday 9:00–18:00. Friday 9:00–20:00.
Closed on Sundays and on public holidays.

## Membership

- Adults pay 24 euros a year.
- Students and pensioners pay 12 euros a year.
- Children under 14 join free of charge.
- A lost card is replaced for 5 euros.

## Loans

| item | loan period | most at once | fine per day |
|---|---|---|---|
| book | 4 weeks | 20 | 0.20 € |
| film | 1 week | 5 | 1.00 € |
| board game | 2 weeks | 3 | 0.50 € |
| e-reader | 3 weeks | 1 | 2.00 € |

Loans are renewed twice at most, unless another reader waits for the item.

## Rooms

The reading room has 46 seats and is open to everybody. The Hale room, for up to 12 people, is booked at the front
desk at least two days ahead. Food is not allowed in either; water in closed bottles is.

## Contact

Head librarian: Dorothea Finch
Telephone: 555 0142
Lost property: at the front desk, kept for 30 days
"""

MANUAL = """# Brauer K3 coffee machine

The K3 was designed in Graz and is built in Maribor. It weighs 7.4 kg and holds 1.8 litres of water.

## First use

1. Remove the blue tape from the drip tray.
2. Fill the tank with cold water up to the MAX line.
3. Press the power button for three seconds; the lamp turns white.
4. Run two cups of water through before the first coffee.

## Care

Descale the machine every 200 cups or when the lamp blinks orange. Use only citric acid; vinegar damages the seals.
The drip tray and the milk jug may go into the dishwasher. The brewing unit must not: rinse it by hand once a week.

## Errors

| code | meaning | what to do |
|---|---|---|
| E1 | tank empty | fill the tank |
| E2 | brewing unit missing | put the unit back until it clicks |
| E3 | pump blocked | descale, then call the service |
| E4 | too hot | switch off for 20 minutes |

## Warranty

The warranty lasts three years for private buyers and one year for offices. It does not cover limescale. Send the
receipt to service@brauer.example.
"""

MINUTES = """Minutes of the allotment society, 14 March 2025

Present: Ines Okafor (chair), Paul Reeve (treasurer), Samira Aziz, Tom Kettle
Apologies: Greta Lindqvist

1. Accounts
Paul Reeve reported a balance of 3,418 pounds at the end of February. The hedge trimmer cost 260 pounds, 40 less than
planned.

2. Water
The tap at plot 17 leaks. Tom Kettle will replace it before Easter. The society will buy four rain barrels for the
lower plots; Samira Aziz will ask two firms for offers.

3. Waiting list
Nineteen people are waiting for a plot. Whoever leaves a plot unused for a year will get a letter, and after six weeks
without an answer the plot goes to the next on the list.

4. Summer party
The party is on 12 July from 3 pm. Greta Lindqvist is asked to bring the tent. No fireworks.

Next meeting: 11 April, 7 pm, at the school
"""

LETTER = """Dear Mr Halloran,

thank you for your order of 2 May. We are sorry that the oak table arrived with a scratched top. Our driver will
collect it on Wednesday between 8 and 12, and bring a new one at the same time. You need not pack it.

For your trouble we have taken 15 percent off the price, so that 612 euros remain to be paid. Please transfer them
within 30 days to the account named on the invoice. The six chairs will follow in the last week of May, since the
weaver who makes the seats has been ill.

Should you have questions, ask for Mrs Brandt in our office in Tilburg, on weekdays until 4 pm.

Yours sincerely,
Anton de Wit
Noorder Furniture
"""

PRODUCTS = """sku,name,colour,weight_kg,price_eur,stock
LT-100,Desk lamp Orion,black,1.2,39.90,14
LT-220,Floor lamp Vega,brass,6.5,129.00,3
CH-310,Office chair Lira,grey,14.8,249.00,0
CH-330,Stool Pico,red,3.9,59.50,27
TB-500,Standing desk Atlas,white,38.0,499.00,6
SH-710,Bookshelf Corvus,walnut,22.4,189.00,9
"""

RECIPE = """Plum cake from Aunt Rosel

For one tray: 400 g flour, 200 g butter, 150 g sugar, 3 eggs, a pinch of salt, 1.5 kg plums.

Knead flour, butter, 100 g of the sugar, the eggs and the salt into a dough and let it rest in the fridge for an hour.
Stone the plums. Roll the dough out on the tray, set the plums on it in rows and sprinkle the rest of the sugar over
them.

Bake at 190 degrees for 45 minutes. Cinnamon goes on only after baking, or it turns bitter. The cake keeps for three
days and tastes best on the second.
"""

DOCUMENTS = {
    "handbook.md": HANDBOOK,
    "manual.md": MANUAL,
    "minutes.txt": MINUTES,
    "letter.txt": LETTER,
    "products.csv": PRODUCTS,
    "plum-cake.txt": RECIPE,
}

ANSWERABLE = [  # a document, a question, and words of its answer
    ("handbook.md", "When is the library open on Fridays?", "20:00"),
    ("handbook.md", "Is the library open on Sundays?", "Closed on Sundays"),
    ("handbook.md", "What are the opening hours?", "Monday to Thursday 9:00"),
    ("handbook.md", "How much do students pay?", "12 euros"),
    ("handbook.md", "What does membership cost for adults?", "24 euros"),
    ("handbook.md", "Do children have to pay?", "free of charge"),
    ("handbook.md", "What does a new card cost if I lose mine?", "5 euros"),
    ("handbook.md", "How long may I keep a film?", "1 week"),
    ("handbook.md", "How long can I borrow a board game?", "2 weeks"),
    ("handbook.md", "What is the fine for an e-reader?", "2.00"),
    ("handbook.md", "How many books can I borrow at once?", "20"),
    ("handbook.md", "How often can a loan be renewed?", "twice"),
    ("handbook.md", "How many seats does the reading room have?", "46"),
    ("handbook.md", "May I eat in the reading room?", "Food is not allowed"),
    ("handbook.md", "Who is the head librarian?", "Dorothea Finch"),
    ("handbook.md", "What is the library's telephone number?", "555 0142"),
    ("handbook.md", "How long is lost property kept?", "30 days"),
    ("manual.md", "How much does the coffee machine weigh?", "7.4"),
    ("manual.md", "Where is the K3 built?", "Maribor"),
    ("manual.md", "What does error E3 mean?", "pump blocked"),
    ("manual.md", "What should I do when E4 is shown?", "20 minutes"),
    ("manual.md", "How often must the machine be descaled?", "200 cups"),
    ("manual.md", "Can I use vinegar?", "vinegar damages"),
    ("manual.md", "Can the brewing unit go into the dishwasher?", "must not"),
    ("manual.md", "How long is the warranty for offices?", "one year"),
    ("manual.md", "Which tape must be removed from the drip tray?", "blue tape"),
    ("manual.md", "How long do I press the power button?", "three seconds"),
    ("manual.md", "Where do I send the receipt?", "service@brauer"),
    ("minutes.txt", "Who is the treasurer?", "Paul Reeve"),
    ("minutes.txt", "Who sent apologies?", "Greta Lindqvist"),
    ("minutes.txt", "How much did the hedge trimmer cost?", "260"),
    ("minutes.txt", "Who will replace the tap?", "Tom Kettle"),
    ("minutes.txt", "How many people are waiting for a plot?", "Nineteen"),
    ("minutes.txt", "When is the summer party?", "12 July"),
    ("minutes.txt", "When is the next meeting?", "11 April"),
    ("minutes.txt", "How many rain barrels will be bought?", "four"),
    ("letter.txt", "What was wrong with the oak table?", "scratched"),
    ("letter.txt", "When will the driver collect the table?", "Wednesday"),
    ("letter.txt", "How much is left to pay?", "612"),
    ("letter.txt", "Why are the chairs late?", "ill"),
    ("letter.txt", "Whom should Mr Halloran ask for in the office?", "Brandt"),
    ("products.csv", "What does the floor lamp Vega cost?", "129.00"),
    ("products.csv", "What colour is the Stool Pico?", "red"),
    ("products.csv", "How heavy is the standing desk Atlas?", "38.0"),
    ("products.csv", "How many bookshelves Corvus are in stock?", "9"),
    ("plum-cake.txt", "How many eggs are needed?", "3 eggs"),
    ("plum-cake.txt", "How long does the cake bake?", "45 minutes"),
    ("plum-cake.txt", "At what temperature is the plum cake baked?", "190"),
    ("plum-cake.txt", "When is cinnamon added?", "after baking"),
    ("plum-cake.txt", "How long does the dough rest?", "an hour"),
]
ABSENT = [
    "When was the library founded?",
    "How many parking spaces does the library have?",
    "Who wrote the library's handbook?",
    "Can I borrow a bicycle from the library?",
    "What is the salary of the head librarian?",
    "How much does the coffee machine cost?",
    "How loud is the K3?",
    "Which colour has the milk jug?",
    "What does error E7 mean?",
    "How many bars of pressure does the pump have?",
    "Who is the secretary of the society?",
    "How much is the yearly rent of a plot?",
    "Who won the prize for the best garden?",
    "What is the phone number of Samira Aziz?",
    "How many members does the society have?",
    "What is Mr Halloran's address?",
    "How many drawers does the cupboard have?",
    "Who drives the van?",
    "What does the office chair Nova cost?",
    "Who makes the bookshelf Corvus?",
    "How long is the cable of the desk lamp?",
    "How many calories does the plum cake have?",
    "Where did Aunt Rosel live?",
    "Who painted the Mona Lisa?",
    "What is the capital of Australia?",
]
FOLLOW_UPS = [  # earlier questions, a question, and words of its answer
    (["How long may I keep a film?"], "And a board game?", "2 weeks"),
    (["How much do students pay?"], "and adults?", "24 euros"),
    (["What does error E3 mean?"], "What about E4?", "too hot"),
    (["Where is the K3 built?"], "How much does it weigh?", "7.4"),
    (["Who is the treasurer?"], "What did he report?", "3,418"),
    (["What does the floor lamp Vega cost?"], "And what colour is it?", "brass"),
    (["When is the summer party?"], "Who brings the tent?", "Greta"),
    (["How long does the cake bake?"], "And at what temperature?", "190"),
    (["How many seats does the reading room have?"], "May I eat there?", "Food is not allowed"),
    (["What was wrong with the oak table?"], "When will it be collected?", "Wednesday"),
]
TWO_PARTS = [
    ("Where is the K3 built and how much does it weigh?", ["Maribor", "7.4"]),
    ("Who is the treasurer and when is the summer party?", ["Paul Reeve", "12 July"]),
    ("How much do adults pay, and how long may I keep a film?", ["24 euros", "1 week"]),
]


def measure(embedder: Embedder, work: Path) -> dict[str, Any]:  # Any: plain JSON
    """Returns the shares of answers that are right, wrong and refused, and of absent ones that are answered."""
    files = work / "everyday-files"
    files.mkdir(parents=True, exist_ok=True)
    for name, text in DOCUMENTS.items():
        (files / name).write_text(text, "utf-8")
    with Library.open(work / "everyday", embedder) as library:
        mine = library.collection("bench")
        job = library.ingest.submit("bench", mine.id, [Given(name, files / name) for name in DOCUMENTS])
        if library.ingest.wait(job.id).counts.get("done") != len(DOCUMENTS):
            raise RuntimeError("The documents could not be indexed; the log says why.")
        there = [_answer(library, question) for _, question, _ in ANSWERABLE]
        right = [wanted in (answer or "") for answer, (*_, wanted) in zip(there, ANSWERABLE, strict=True)]
        absent = [_answer(library, question) for question in ABSENT]
        follow_ups = [wanted in (_answer(library, question, earlier) or "") for earlier, question, wanted in FOLLOW_UPS]
        two_parts = [
            all(each in (_answer(library, question) or "") for each in wanted) for question, wanted in TWO_PARTS
        ]
    return {
        "questions": len(there),
        "right": sum(right) / len(there),
        "refused_though_there": there.count(None) / len(there),
        "wrong": sum(answer is not None and not ok for answer, ok in zip(there, right, strict=True)) / len(there),
        "absent": len(absent),
        "answered_though_absent": 1 - absent.count(None) / len(absent),
        "follow_ups_right": f"{sum(follow_ups)} of {len(follow_ups)}",
        "two_parts_right": f"{sum(two_parts)} of {len(two_parts)}",
    }


def _answer(library: Library, question: str, earlier: list[str] | None = None) -> str | None:
    """Returns what is quoted; None: nothing is probable enough."""
    asked = resolve(question, [(each, "") for each in earlier or []])
    rarity = library.rarity("bench")
    hits = library.search(Query("bench", asked.text, 6)).hits
    found = sources(library.store, "bench", hits, 4000, lambda text: len(text) // 4, parents=False)
    quoted = [
        with_context(part.text, best).shown
        for part in asked.parts()
        for best in library.ranker.rank(part.text, found, part.rarity(rarity), 1)
        if best.probability >= ANSWERS
    ]
    return "\n".join(quoted) or None
