"""Reads facts that a user states of themselves from a message, in English and German, by patterns and no model.

Precise before complete: a statement counts only where it begins a sentence, or follows "and" after one that counts.
Quotations, code, questions, hypotheticals, negations, fiction and messages that hand over a text to work on state
nothing. An attribute (name, home, work) has one value at a time, so that a later statement replaces an earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_MESSAGE = 2_000  # characters: a longer one is a text that was pasted
MAX_STATEMENT = 300


@dataclass(frozen=True, slots=True)
class StatedFact:
    """`text`: the user's words. `attribute`: the one thing that it tells, None where several may hold at a time."""

    text: str
    attribute: str | None


# Capitals that are no person's and no place's name: software, days, months, and what German writes with one.
_NO_NAME = (
    r"(?:Linux|Windows|Mac|Ubuntu|Debian|Fedora|Arch|Android|Chrome|Firefox|Safari|Edge|Python|Rust|Java|Kotlin|"
    r"Swift|Go|"
    r"Ruby|Perl|Scala|Postgres|React|Angular|Vue|Svelte|Docker|Kubernetes|Azure|Git|Slack|Teams|Notion|Vim|"
    r"Excel|Word|"
    r"Outlook|Redis|Reddit|Stack|Scratch|Siri|Alexa|Matrix|Earth|Hell|Heaven|Fun|Speed|Gedanken|Saus|Geld|"
    r"Erste[rn]?|Chef|Dr|Mr|Mrs|Ms|Prof|Minecraft|Mordor|Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|"
    r"Sunday|January|February|March|April|"
    r"June|July|August|September|October|November|December|Christmas|Easter|Mars|Venus|Hogwarts|Hase|Hause|"
    r"Stadt|Land|Dorf|Plan|Programm|Dusche|Schule|Firma|Wohnung|Miete|Angst|Sorge|Armut|Frieden|Ruhe|Rente|Not|"
    r"Urlaub|Gefahr|Sicherheit|Montag|Dienstag|Mittwoch|Donnerstag|Freitag|Samstag|Sonntag|Ahnung|"
    r"[\w-]*(?:ung|schaft|heit|keit|verhältnis(?:sen)?)|(?!(?:USA|NYC|UK|UAE|US)\b)[A-Z]{1,12}|\w*[a-z][A-Z]\w*|"
    r"\w*\d\w*)\b"
)
_TITLE = r"(?:(?:Dr|Mr|Mrs|Ms|Prof)\. )"
_WORD = rf"(?:[A-Z]['’](?=[A-Z]))?(?!{_NO_NAME})[^\W\d_a-zà-öø-ÿ][\w’-]*"  # begins with a capital
_NAME = rf"{_TITLE}*{_WORD}(?: {_WORD}){{0,3}}"
_PLACE = (
    rf"(?:(?:a|an|the|der|einem|einer) )?(?:(?!{_NO_NAME})[a-zà-öø-ÿ][\w-]* ){{0,4}}?(?:(?:Stadt|Dorf|Ort) "
    rf"(?:bei|in|nahe) )?(?:St\. )?{_WORD}(?:, {_WORD})?(?: {_WORD})*(?: (?:with|near|in|outside|since|for|now|"
    rf"nowadays|and my|mit|bei)\b[^.,;!?:]*?)?"
)
_SINCE = r"(?: (?:now|recently|last \w+|this \w+|in (?:\d{4}|[A-Z]\w+)|(?:\w+ )?\w+ ago|for \w+))?"
_END = r"(?=\s*(?:$|[.,;!?]|and (?:I|my|live|work)\b|und (?:ich|meine?|wohne|lebe|arbeite)\b))"
_DIETS = r"vegetarian|vegan|pescatarian|gluten[- ]free|lactose[- ]intolerant"
_DIETS_DE = r"vegetarier(?:in)?|vegetarisch|veganer(?:in)?|vegan|pescetarier(?:in)?|laktoseintolerant"
_FOOD = (
    r"(?:(?:any |red |raw |much )?(?:pork|meat|beef|lamb|chicken|poultry|fish|seafood|shellfish|dairy|eggs?|"
    r"milk|cheese|"
    r"gluten|wheat|soy|nuts|peanuts|sugar|bread|mushrooms|tomatoes|onions|garlic|alcohol|wine|beer|coffee|tea|"
    r"caffeine))"
)
_FOOD_DE = (
    r"(?:(?:rotes )?(?:Fleisch|Schweinefleisch|Rindfleisch|Fisch|Eier|Milch|Käse|Gluten|Weizen|Nüsse|Erdnüsse|Zucker|"
    r"Brot|Pilze|Zwiebeln|Alkohol|Wein|Bier|Kaffee|Tee|Soja|Meeresfrüchte))"
)
_ALLERGEN = (
    rf"(?:{_FOOD}|cats?|dogs?|horses|animal hair|dust(?: mites)?|pollen|grass|hay|birch|bee stings|wasp stings|"
    rf"penicillin|"
    r"latex|nickel|kiwis?|strawberries|sesame|lactose|almonds|walnuts|hazelnuts|cashews)"
)
_ALLERGEN_DE = (
    rf"(?:{_FOOD_DE}|Katzen(?:haare)?|Hunde(?:haare)?|Pferde|Staub|Hausstaub|Pollen|Gräser|Birke|Bienenstiche|"
    r"Wespenstiche|Penicillin|Latex|Nickel|Kiwis?|Erdbeeren|Sesam|Mandeln|Walnüsse|Haselnüsse)"
)
_LIKED = (
    r"(?:colou?r|food|dish|drink|book|author|writer|poet|film|movie|series|band|singer|musician|composer|artist|"
    r"painter|song|"
    r"album|sport|team|animal|season|city|country|game|hobby|subject|flower|fruit|number|programming language|"
    r"cuisine)"
)
_LIKED_DE = (
    r"(?:farbe|essen|gericht|getränk|buch|autorin|autor|film|serie|band|sängerin|sänger|lied|sportart|sport|"
    r"verein|tier|"
    r"jahreszeit|stadt|land|spiel|fach|blume|obst|zahl|sprache)"
)
# Of how somebody wants answers, which holds in every chat.
_MANNER = (
    r"(?:(?:to write in |answers in |replies in )?(?:British|American) English|metric units|imperial units|"
    r"Celsius|Fahrenheit|"
    r"(?:[a-z]+ ){0,2}(?:answers|replies|responses|explanations|bullet points|sentences|tables|code examples))"
)
_MANNER_DE = r"(?:(?:[a-zäöüß]+ ){0,2}(?:Antworten|Erklärungen|Stichpunkte|Sätze|Tabellen|Codebeispiele))"
_SIDE = (
    r"(?!(?:the|this|that|these|those|it|option|your|my|his|her|not|nothing|one|whichever|whatever|more|less|"
    r"die|das|den|dein|deine|mein|meine|nichts)\b)[^\W\d_]{2,}(?: [^\W\d_]{2,})?"
)
_MONTH = (
    r"(?:jan(?:uary|uar)?|feb(?:ruary|ruar)?|mar(?:ch)?|märz|apr(?:il)?|may|mai|june?|juni|july?|juli|aug(?:ust)?|"
    r"sep(?:t|tember)?|o[ck]t(?:ober)?|nov(?:ember)?|de[cz](?:ember)?)"
)
_DAY = (
    rf"(?:[\w ]{{0,12}})?(?:\d{{1,2}}(?:\.|st|nd|rd|th)? (?:of )?{_MONTH}|{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?|"
    rf"\d{{4}})(?: \d{{4}})?"
)
_TRADE = (  # as the words for them end
    r"(?:[a-z]+(?:er|or|ist|ian|ant|ect|tary|eer|man|woman|ive)|nurse|chef|cook|pilot|judge|paramedic|medic|"
    r"guide|clerk|"
    r"vet|au pair|smith|student|scientist|mathematician|agent)"
)
_EMPLOYER = (
    r"(?:library|charity|bank|school|university|hospital|company|firm|agency|council|museum|newspaper|church|"
    r"city|state|government|start-?up|shop|hotel|airline|railway)"
)
_REST = r"[^.,;!?:]+?"

# Each: the attribute, and the pattern of the whole statement. `{1}` stands for the first group.
_PATTERNS: tuple[tuple[str | None, re.Pattern[str]], ...] = tuple(
    (attribute, re.compile(pattern + _END, flags))
    for attribute, pattern, flags in (
        ("name", rf"(?i:my (?:full )?name(?: is|['’]s)) {_NAME}", 0),
        ("called", rf"(?i:(?:please |just |you can |you may )*call me) {_NAME}(?: please)?", 0),
        ("home", rf"(?i:I (?:currently |now )?live in) {_PLACE}", 0),
        ("home", rf"(?i:I (?:have |just )?moved to|I['’]ve (?:just )?moved to) {_NAME}{_SINCE}", 0),
        ("origin", rf"(?i:I am|I['’]m|I come) (?i:originally )?from {_NAME}(?: originally)?", 0),
        ("work", rf"(?i:I (?:currently |now )?work) (?:as an? (?:[a-z-]+ ){{0,2}}?{_TRADE}(?: in {_NAME}| at "
            rf"{_NAME}| for {_NAME})?|(?:at|for) (?:the )?{_NAME}(?: (?:in|of) {_NAME})?)", 0),
        ("work", rf"(?i:I work for) (?:the|a|an) (?:[a-z-]+ )*?{_EMPLOYER}", 0),
        ("diet", rf"(?:I am|I['’]m) (?:a |an )?(?:strict )?(?:{_DIETS})", re.I),
        (None, rf"I (?:don['’]t|do not|never) (?:eat|drink) {_FOOD}(?: (?:and|or) {_FOOD})*", re.I),
        ("allergy", rf"(?:I am|I['’]m) (?:very |severely )?allergic to {_ALLERGEN}(?:(?:,| and|, and) "
            rf"{_ALLERGEN})*", re.I),
        ("birthday", rf"my birthday is (?:on )?(?:the )?{_DAY}", re.I),
        ("birthday", rf"I was born (?:on|in) (?:the )?{_DAY}", re.I),
        ("favourite {1}", rf"my favou?rite ({_LIKED}) is (?!(?:not|over|random|unknown|that|when|how|where|what|"
            rf"the one|this|broken|gone|your|my|his|her)\b){_REST}", re.I),
        ("{1} language", rf"(?i:my (native|first) language is) {_WORD}", 0),
        ("native language", rf"(?i:my mother tongue is) {_WORD}", 0),
        ("preference", rf"(?i:I (?:really |always |usually |generally )?prefer) (?:{_SIDE} (?:over|to|rather "
            rf"than) {_SIDE}|{_MANNER})", 0),
        ("name", rf"(?i:ich hei(?:ß|ss)e|mein name ist) (?!Sie\b){_NAME}", 0),
        ("called", rf"(?i:bitte )?(?i:nenne? mich|nennen sie mich) (?i:bitte |einfach )*{_NAME}", 0),
        ("called", rf"(?i:du kannst mich|sie können mich) {_NAME} (?i:nennen)", 0),
        ("home", rf"(?i:ich (?:wohne|lebe) (?:jetzt |derzeit )?in) {_PLACE}", 0),
        ("home", rf"(?i:ich bin (?:jetzt |gerade )?nach) {_NAME} (?i:gezogen|umgezogen)", 0),
        ("origin", rf"(?i:ich komme (?:ursprünglich )?aus) {_NAME}", 0),
        ("work", rf"(?i:ich arbeite als) {_WORD}(?: in {_NAME})?", 0),
        ("work", rf"(?i:ich arbeite (?:bei|für)) (?:der |dem |die |das |einer |einem )?{_NAME}", 0),
        ("work", r"ich bin \w+ von beruf", re.I),
        ("diet", rf"ich bin (?:{_DIETS_DE})", re.I),
        ("diet", r"ich ernähre mich (?:vegetarisch|vegan|glutenfrei|koscher|halal)", re.I),
        (None, rf"(?i:ich (?:esse|trinke) keine?n?) {_FOOD_DE}", 0),
        ("allergy", rf"(?i:ich bin allergisch (?:gegen|auf)) {_ALLERGEN_DE}(?: und {_ALLERGEN_DE})?", 0),
        ("birthday", rf"mein geburtstag ist (?:am |im )?{_DAY}", re.I),
        ("birthday", rf"ich habe (?:am|im) {_DAY} geburtstag", re.I),
        ("{1}", rf"meine? (lieblings{_LIKED_DE}) ist (?!(?:nicht|kein\w*|aus|vorbei|zufällig|das|wenn|kaputt|"
            rf"weg|dein\w*)\b){_REST}", re.I),
        ("native language", rf"(?i:meine muttersprache ist) {_WORD}", 0),
        ("preference", rf"(?i:ich bevorzuge) (?:{_SIDE} (?:vor|gegenüber|statt) {_SIDE}|{_MANNER_DE})", 0),
    )
)  # fmt: skip
_TOLD = re.compile(
    r"(?:please )?(?:remember(?: that(?= (?:i|i['’]\w+|my|our)\b)|:)"
    r"|(?:bitte )?(?:merke? dir|denke? daran)(?: bitte)?(?:, dass(?= (?:ich|meine?|unsere?)\b)|:)"
    r")\s*(?=(?:i|i['’]\w+|we|my|our|the|ich|wir|meine?|unsere?|der|die)\b)(?P<what>[^?]{3,})",
    re.IGNORECASE,
)  # fmt: skip
_QUOTED = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\"[^\"\n]*\"|“[^”\n]*”|„[^“”\n]*[“”]|«[^»\n]*»|»[^«\n]*«|(?<!\w)['‘][^'’\n]+['’](?!\w)",
    re.DOTALL,
)
_GIVEN = re.compile(  # a text to work on, or one to make up
    r"\b(?:translat\w*|proofread|paraphras\w*|rephras\w*|rewrite|reword|summari[sz]e|correct (?:this|the|my|"
    r"these)|grammar|"
    r"spelling|story|stories|poem|lyrics|song|novel|fiction\w*|character|role-?play\w*|dialogue|script|"
    r"screenplay|game|"
    r"pretend\w*|imagine|suppose\w*|assum(?:e|ing)|hypothetical\w*|let['’]?s say|say i|act as|you are|you['’]re|"
    r"(?:cover )?letter|e-?mail|essay|speech|conjugat\w*|sentence|phrase|quote\w*|wrote|writes|says|said|"
    r"übersetz\w*|korrigier\w*|umformulier\w*|fasse?\b.*\bzusammen|geschichte|gedicht|roman|rollenspiel|spiel\w*|"
    r"angenommen|stell(?:e)? dir vor|brief|aufsatz|satz|sagte|schrieb|sagt)\b",
    re.IGNORECASE,
)
_SPEECH_TAG = re.compile(
    r",\s*(?:(?:he|she|they|er|sie)\s+\w+|(?:\w+\s+)?(?:said|says|lied|joked|thought|obviously)|(?:sagte|"
    r"behauptet|meint|sagt)\s+\w+)",
    re.IGNORECASE,
)
_TECHNICAL = re.compile(
    r"\b(?:function|method|variable|array|list|string|input|output|script|query|table|column|class|loop|"
    r"returns?|null|"
    r"none|parameter|argument|by value|sorted|index|integer|file|repo\w*|branch|server|api|funktion|liste|"
    r"eingabe|datei)\b",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_ABBREVIATION = re.compile(r"(?:\b(?:Dr|Mr|Mrs|Ms|Prof|St|Hr|Fr)|\b\d{1,2})\.\s*$")
_LEAD = re.compile(
    r"(?:(?:hi|hello|hey|hallo|hej|moin|thanks|thank you|danke|ok|okay|well|so|also|and|but|btw|fyi|by the way|"
    r"übrigens|und|aber|good (?:morning|evening|day)|guten (?:tag|morgen|abend))(?: there)?[,!:]?\s+)+",
    re.IGNORECASE,
)
_GOES_ON = re.compile(r"(?:,? (?:and|und) |[,;] (?:and |und )?)(?P<subject>I |my |ich |meine? )?", re.IGNORECASE)
_JOINED = re.compile(r" (?:and|und) (?:I|my|ich|meine?|work|live|lebe|arbeite|wohne) ", re.IGNORECASE)
_ASKS_ELSE = re.compile(
    r",\s*(?:so |and |but |und |also )?(?:what|where|which|how|when|who|why|can you|could you|would you|is "
    r"there|are there|"
    r"do you|was|wo|welche\w*|wie|wann|wer|warum|kannst du|können sie|gibt es)\b",
    re.IGNORECASE,
)
_WORDS_OF_CHOICE = re.compile(r"\b(?:prefer|bevorzuge|really|always|usually|generally|to|over|rather|than|vor|"
    r"gegenüber|statt|i|ich|drinking)\b", re.I)  # fmt: skip
_COMPARES = re.compile(r"\b(?:over|than|to|gegenüber|vor)\b", re.IGNORECASE)
_THIRD = (
    (re.compile(r"^(?:the )?user['’]s ", re.I), "my "),
    (re.compile(r"^(?:the )?user (?:is|has) ", re.I), "I am "),
)
_VERB = re.compile(r"^(?:the )?user (live|work|prefer|come|move)(?:s|d) ", re.IGNORECASE)


def stated_facts(message: str) -> list[StatedFact]:
    """Returns the facts that a message states of its writer, in its order."""
    if len(message) > MAX_MESSAGE:
        return []
    own = "\n".join(line for line in _QUOTED.sub(" … ", message).split("\n") if not line.lstrip().startswith(">"))
    handed_over = _GIVEN.search(own) is not None
    found = dict[str | None, StatedFact]()
    for sentence in _sentences(own):
        if _SPEECH_TAG.search(sentence):
            continue
        for fact in _told(sentence) or (() if handed_over else _stated(sentence)):
            found[fact.attribute or fact.text.casefold()] = fact
    return list(found.values())


def attribute_of(note: str) -> str | None:
    """Returns the attribute that a note about the user tells, whether it says "I" or "the user"."""
    text = note.strip().rstrip(".")
    for third, first in _THIRD:
        text = third.sub(first, text)
    text = _VERB.sub(lambda verb: f"I {verb[1].replace('move', 'moved')} ", text)
    found = _match(text)
    return found.attribute if found is not None and len(found.text) == len(text) else None


def _sentences(text: str) -> Iterator[str]:
    held = ""
    for part in _SENTENCE.split(text):
        held = f"{held} {part}".strip()
        if not _ABBREVIATION.search(held):
            yield held
            held = ""
    if held:
        yield held


def _told(sentence: str) -> list[StatedFact]:
    """Returns the fact that the user asks to have remembered."""
    told = _TOLD.match(_LEAD.sub("", sentence, count=1) if _LEAD.match(sentence) else sentence)
    if told is None or sentence.rstrip().endswith("?") or _TECHNICAL.search(sentence):
        return []
    what = told["what"].strip().rstrip(".!").strip()
    return [StatedFact(_capitalised(what), attribute_of(what))] if 3 <= len(what) <= MAX_STATEMENT else []


def _stated(sentence: str) -> Iterator[StatedFact]:
    asks = sentence.rstrip().endswith("?")
    rest = sentence
    if lead := _LEAD.match(rest):
        rest = rest[lead.end() :]
    while (found := _match(rest)) is not None:
        after = rest[len(found.text) :]
        if asks and not _ASKS_ELSE.match(after):
            return
        if (joined := _JOINED.search(found.text)) is not None and (first := _match(rest[: joined.start()])) is not None:
            found, after = first, rest[joined.start() :]
        yield StatedFact(_clean(found.text), found.attribute)
        onward = _GOES_ON.match(after)
        if onward is None:
            return
        rest = after[onward.start("subject") if onward["subject"] else onward.end() :]
        if not onward["subject"]:
            if not re.match(r"(?:work|live|prefer|lebe|arbeite|wohne|bevorzuge)\b", rest, re.IGNORECASE):
                return
            rest = f"{'ich' if re.match(r'(?:lebe|arbeite|wohne|bevorzuge)', rest, re.IGNORECASE) else 'I'} {rest}"


def _match(text: str) -> StatedFact | None:
    for attribute, pattern in _PATTERNS:
        found = pattern.match(text)
        if found is None or len(found[0]) > MAX_STATEMENT:
            continue
        named = attribute
        if attribute == "preference":
            words = sorted(set(re.findall(r"\w+", _WORDS_OF_CHOICE.sub(" ", found[0]).casefold())))
            compared = _COMPARES.search(re.sub(r"prefer to ", "", found[0]))
            named = f"preference: {', '.join(words)}" if compared else None
        elif attribute is not None and "{1}" in attribute:
            named = attribute.replace("{1}", found[1].casefold())
        return StatedFact(found[0], named)
    return None


def _clean(text: str) -> str:
    """Returns a statement without the politeness around it."""
    text = re.sub(r"^(?:please |just |bitte |you can |you may )+(?=call|nenn)", "", text.strip(), flags=re.IGNORECASE)
    text = re.sub(r"(?<=mich) (?:bitte |einfach )+", " ", re.sub(r" please$", "", text))
    return _capitalised(text)


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
