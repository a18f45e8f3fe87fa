"""Passages and questions of the gate: made up, so that no model knows them, and each question is answered by one."""

from __future__ import annotations

PASSAGES = (
    "The harbour of Velden was dug between 1871 and 1874, after the old quay had been lost to two floods. Its "
    "north mole is 412 metres long and carries a light of the third order, which was lit with gas until 1923. The "
    "harbour master lives in the stone house beside the lock, and keeps a book of every ship that comes in. In the "
    "winter of 1929 the basin froze over, and for five weeks goods were brought to the town by sledge. Today it "
    "has forty berths, most of them let to families of the town, and a small yard that repairs wooden hulls.",
    "The bakery of Anna Tiller opens at half past five, except on Mondays. It bakes eleven kinds of bread in an "
    "oven that is heated with beech wood, and the rye loaf is the one that people come for from the villages "
    "around. Her grandfather built the oven from bricks of a brewery that was torn down. In spring she adds a flat "
    "bread with wild garlic, and in December small cakes with aniseed. The shop has no sign: a lamp over the door "
    "is lit when bread can be bought, and put out when the shelves are empty, which is often before nine.",
    "A barrel organ plays from a roll of card in which holes have been punched. Each hole lets air through to a "
    "pipe, and a longer hole makes a longer note. The rolls of the organ in Marrick's museum were punched by hand, "
    "and a march of three minutes took a week. The bellows are moved by the same crank as the roll, so a tired "
    "hand makes the music slower and lower at once. Of the forty rolls that came with it nineteen can still be "
    "played; the others were eaten by silverfish while the organ stood in a barn between the wars.",
    "The footpath over the Kerr ridge is marked with white stones and takes about six hours from the mill to the "
    "lake. It climbs through larch wood for the first two hours, then over open grass where there is no shade and "
    "no water. A hut below the top is open from June to September and has twelve beds. Snow may lie on the north "
    "side until the end of May. Whoever comes down after dark should keep to the left of the stream, as the bridge "
    "on the right was carried away and has not been built again.",
    "The clock of the town hall in Osterby has one hand. It was made by a smith named Harald Bruun, who had seen "
    "such a clock in the south and thought that minutes were of no use to farmers. It is wound every second day "
    "with a crank of oak, by a member of the council chosen by lot. In 1958 the council bought an electric clock, "
    "which stopped in its first winter, so the old one was put back. It loses about four minutes in a month, and "
    "is set right by the noon train.",
    "The reed bed at Lower Finn cleans the water of two hundred houses. The water stands in a tank for a day, so "
    "that what is heavy sinks, and then flows through gravel in which reeds grow; what lives on their roots eats "
    "what is left. It needs no machine but a pump that lifts the water once. In the third year the reeds were cut "
    "for the first time, and thatched the roof of the school. A heron has nested there since, though the fish that "
    "it eats come from the pond below, where the water is clear enough to see the stones.",
)
QUESTIONS = (  # of the passage of the same number
    ("How long is the north mole?", "For how long were goods brought by sledge?"),
    ("When does the bakery open?", "What is the oven heated with?"),
    ("How many rolls can still be played?", "How long did it take to punch a march?"),
    ("How many beds does the hut have?", "Until when may snow lie on the north side?"),
    ("Who made the clock?", "How much does the clock lose in a month?"),
    ("How many houses does the reed bed serve?", "When were the reeds cut for the first time?"),
)
INSTRUCTION = "Answer from the sources. Quote the sentence that answers and name its source."
SHOWN = 4  # passages of a prompt
