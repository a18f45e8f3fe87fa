"""Texts and questions for the probe of `document_answers`. All of it is made up, so that no model knows the answers."""

from __future__ import annotations

TEXTS = (
    "Velm is a fishing town on the Orrin coast. Its harbour was dug in 1741 by order of Duchess Karla Menn. "
    "The town has 8,420 inhabitants. A market for herring is held on Thursdays. The old customs house is a library "
    "today. In winter the ferry to Sarn sails twice a day. The lighthouse north of the harbour is 47 metres high. "
    "Its keeper, Jon Abelar, retired in 1998, and the lamp has been automatic since then.",
    "The Tarrow bridge carries a railway over the Ise gorge. It was designed by Petra Lindqvo, an engineer from Sarn. "
    "Building it took six years and cost 3.2 million crowns. Eleven workers died when a crane fell in March 1903. "
    "The bridge was opened on 14 May 1905. Trains may cross it at 60 km/h. It was painted green until 1950, and has "
    "been red since. A footpath below the tracks is closed in storms.",
    "The Halden pump moves 120 litres of water a minute. It runs on a battery of 24 volts for about nine hours. "
    "Clean the filter every two weeks with warm water, never with soap. If the red lamp blinks twice, the inlet is "
    "blocked. If it blinks four times, the battery is empty. The pump must not be used for petrol. The warranty lasts "
    "three years from the day of purchase. Spare filters have the part number HF-77.",
    "The committee met on 3 October in the school of Dorn. Miriam Osei was elected treasurer. The members decided to "
    "plant 200 lime trees along Mill Street. The fee rises from 12 to 15 crowns in January. Tomas Reik will write to "
    "the council about the broken street lamps. The summer fair was cancelled because the field is flooded. The next "
    "meeting is on 7 November. Coffee was paid for by the bakery.",
)

QUESTIONS = (
    ("Who ordered the harbour of Velm to be dug?", "Karla Menn"),
    ("How many people live in Velm?", "8,420"),
    ("On which day is the herring market?", "Thursdays"),
    ("How high is the lighthouse?", "47 metres"),
    ("Who designed the Tarrow bridge?", "Petra Lindqvo"),
    ("How much did the bridge cost?", "3.2 million crowns"),
    ("When was the Tarrow bridge opened?", "14 May 1905"),
    ("How fast may trains cross the bridge?", "60 km/h"),
    ("How much water does the Halden pump move?", "120 litres"),
    ("What does it mean when the red lamp blinks four times?", "the battery is empty"),
    ("How long does the warranty last?", "three years"),
    ("What part number do spare filters have?", "HF-77"),
    ("Who is the new treasurer?", "Miriam Osei"),
    ("How many trees will be planted?", "200 lime trees"),
    ("Why was the summer fair cancelled?", "flooded"),
    ("When is the next meeting?", "7 November"),
)
