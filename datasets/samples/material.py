"""Text material for the sample dialogues: names, places, situations, small talk.

Everything here was written for this project.  `make_samples.py` turns it into
dialogue-summary pairs.

Conventions
-----------
* A turn is written ``"A> first phrasing | second phrasing"``: the speaker's role,
  then the phrasings to choose from.  Roles are A (raises the matter), B (answers)
  and C (a third speaker, only in outcomes that need one).
* ``{slots}`` are filled once per dialogue, so the same value stands in the dialogue
  and in its summary.  ``{a_item}`` is slot ``item`` with the fitting a/an.
  ``{why1}``, ``{why3}`` and ``{whyn}`` are one reason in the first person, in the
  third person and as a noun.
* In greetings, asides, small talk and news the n-th question goes with the n-th answer; elsewhere any
  phrasing goes with any other.
* The turns of a topic's `opening` end with A, its `asides` are (B asks, A answers)
  pairs, and an outcome begins with B or C.  So any number of asides fits between
  the opening and the outcome.
* The values that a slot may take are one string, separated by commas.
* No gendered pronouns: a name does not settle the pronoun.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NAMES = (
    "Anna,Tom,Kate,Ben,Lucy,Mark,Emma,Paul,Nina,Jack,Olivia,Sam,Ella,Max,Julia,Peter,Sophie,"
    "Leo,Mia,Adam,Laura,David,Alice,Oscar,Maria,Tim,Hannah,Noah,Clara,Hugo,Rosa,Victor,Eva,"
    "Simon,Greta,Omar,Priya,Felix,Ruth,Ivan"
)
WHEN = "on Monday,on Tuesday,on Wednesday,on Thursday,on Friday,on Saturday,on Sunday,tomorrow"
TIME = "3,4,5,6,7,8,9,10,11,noon,half past five,half past six,half past nine"
PLACE = (
    "the station,the library,the park,the bus stop,the post office,the bakery,the bank,the gym,"
    "the school,the fountain,the bridge,the bookshop,the museum,the market,the office,the town hall"
)

# (first person, third person, noun)
REASONS = (
    ("I have to work late", "has to work late", "work"),
    ("I have a dentist appointment", "has a dentist appointment", "a dentist appointment"),
    ("I have a bad cold", "has a bad cold", "a bad cold"),
    ("I have to go to a wedding", "has to go to a wedding", "a wedding"),
    ("I have to babysit my nephew", "has to babysit", "babysitting"),
    ("I have guests from Spain", "has guests from Spain", "guests from Spain"),
    ("I have a training course", "has a training course", "a training course"),
    ("I have a deadline", "has a deadline", "a deadline"),
    ("I have a piano lesson", "has a piano lesson", "a piano lesson"),
    ("I have a family dinner", "has a family dinner", "a family dinner"),
    ("I have to take the car to the garage", "has to take the car to the garage", "trouble with the car"),
    ("I have a night shift", "has a night shift", "a night shift"),
)


@dataclass(frozen=True)
class Outcome:
    """How a situation ends: its turns, the summaries that fit, and the mood of the thanks."""

    turns: tuple[str, ...]
    summaries: tuple[str, ...]
    good: bool = True


@dataclass(frozen=True)
class Topic:
    """A situation: who asks what, what may be asked back, and the ways it can end."""

    name: str
    opening: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    asides: tuple[tuple[str, str], ...] = ()
    slots: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class News:
    """A second matter that comes up in long dialogues and earns a sentence of its own."""

    turns: tuple[str, ...]
    summaries: tuple[str, ...]
    slots: dict[str, str] = field(default_factory=dict)


TOPICS: tuple[Topic, ...] = (
    Topic(
        "outing",
        slots={
            "plan": "go bowling,go swimming,go hiking,go ice skating,play board games,"
            "go dancing,go climbing,have a picnic"
        },
        opening=(
            "A> Do you want to {plan} {when}? | I'd like to {plan} {when}. Are you in? | "
            "We could {plan} {when}. What do you think?",
        ),
        asides=(
            (
                "B> Who else is coming? | Is it just the two of us?",
                "A> Just us so far. | Nobody else yet, but the more the merrier.",
            ),
            (
                "B> Is it expensive? | How much will it cost?",
                "A> Not really, it's almost free. | It's cheap, don't worry.",
            ),
            (
                "B> I haven't done that in ages! | Wow, the last time was years ago!",
                "A> Me neither, so it will be fun. | Then it's about time!",
            ),
        ),
        outcomes=(
            Outcome(
                (
                    "B> Great idea! Where shall we meet? | I'd love to! Where do we meet?",
                    "A> At {place}, at {time}. | Let's meet at {place} at {time}.",
                    "B> Perfect, I'll be there. | OK, see you at {place}!",
                ),
                (
                    "{A} and {B} will {plan} {when}. They will meet at {place} at {time}.",
                    "{A} and {B} are going to {plan} {when}. They meet at {place} at {time}.",
                ),
            ),
            Outcome(
                (
                    "B> Sorry, I can't. {why1}. | I'm afraid not, {why1}.",
                    "A> Oh, what a pity. How about {when2}? | That's a shame. Maybe {when2} instead?",
                    "B> Yes, that works for me. | {when2}, yes, I'm free then.",
                ),
                (
                    "{A} wants to {plan} {when} but {B} {why3}. They will do it {when2} instead.",
                    "{B} can't {plan} with {A} {when} because of {whyn}. They will do it {when2}.",
                ),
            ),
            Outcome(
                (
                    "B> I'd love to, but {why1}. | I can't this time, {why1}.",
                    "A> Too bad. I'll ask somebody else then. | No problem, maybe another time.",
                ),
                (
                    "{A} wants to {plan} {when}. {B} can't come because of {whyn}.",
                    "{A} invites {B} to {plan} {when} but {B} {why3}.",
                ),
                good=False,
            ),
            Outcome(
                (
                    "B> Sure, count me in! | Yes, I'd love to!",
                    "C> Can I come too? | That sounds fun, may I join you?",
                    "A> Of course, {C}! We meet at {time}. | Sure, {C}, we start at {time}.",
                ),
                (
                    "{A}, {B} and {C} will {plan} {when} at {time}.",
                    "{A} and {B} will {plan} {when} at {time}. {C} will join them.",
                ),
            ),
        ),
    ),
    Topic(
        "lost",
        slots={
            "item": "umbrella,phone,wallet,scarf,notebook,key,backpack,jacket",
            "spot": "kitchen,car,bathroom,garden,hall,living room,garage,bedroom",
        },
        opening=(
            "A> I can't find my {item}! Have you seen it? | Did I leave my {item} at your place? | "
            "I've lost my {item}. Do you know where it could be?",
        ),
        asides=(
            ("B> What does it look like? | Which one?", "A> It's the blue one. | The red one, you know it."),
            (
                "B> When did you last have it? | When did you see it last?",
                "A> I had it this morning. | I'm not sure, maybe yesterday.",
            ),
            (
                "B> Did you check your bag? | Have you looked in your bag?",
                "A> Yes, twice. It isn't there. | Of course, nothing there.",
            ),
        ),
        outcomes=(
            Outcome(
                (
                    "B> Yes, it's in my {spot}! | I found it in my {spot}!",
                    "A> What a relief! Can I pick it up {when}? | Great! Can I come for it {when}?",
                    "B> Sure, come at {time}. | Yes, I'm home at {time}.",
                ),
                (
                    "{A} has lost {a_item}. {B} found it in the {spot}. {A} will pick it up {when} at {time}.",
                    "{B} has found {A}'s {item} in the {spot}. {A} will collect it {when} at {time}.",
                ),
            ),
            Outcome(
                (
                    "B> No, sorry, I haven't seen it. | No idea, it's not here.",
                    "A> Then I'll go back to {place} and ask. | I'll try {place}, I was there before.",
                ),
                (
                    "{A} has lost {a_item}. {B} hasn't seen it, so {A} will look for it at {place}.",
                    "{B} doesn't know where {A}'s {item} is. {A} will ask at {place}.",
                ),
                good=False,
            ),
            Outcome(
                (
                    "B> I don't have it. {C}, have you seen it? | Not here. Maybe {C} knows?",
                    "C> Yes, you left it at {place}. | I have it! You forgot it at {place}.",
                    "A> Thank you, {C}! | You saved me, {C}!",
                ),
                (
                    "{A} has lost {a_item}. {C} says that {A} left it at {place}.",
                    "{A} is looking for {a_item}. {B} doesn't have it but {C} knows that it was left at {place}.",
                ),
            ),
        ),
    ),
    Topic(
        "report",
        slots={"work": "report,presentation,budget,contract,article,newsletter"},
        opening=(
            "A> How is the {work} going? We need it {when}. | "
            "The boss wants the {work} {when}. Will you be ready? | "
            "Remember that the {work} is due {when}. Is it done?",
        ),
        asides=(
            (
                "B> How long should it be? | How many pages do they want?",
                "A> About ten pages. | Five pages are enough.",
            ),
            ("B> Who is going to read it? | Who is it for?", "A> The whole team. | The director, I think."),
            (
                "B> Should I add some charts? | Do we need pictures in it?",
                "A> Yes, a few would be nice. | Not really, keep it simple.",
            ),
        ),
        outcomes=(
            Outcome(
                (
                    "B> It's almost finished. I'll send it at {time}. | Nearly done. You'll have it at {time}.",
                    "A> Excellent, I'll check it right away. | Great, I'll read it at once.",
                ),
                (
                    "{B} will send {A} the {work} at {time}. It is due {when}.",
                    "The {work} is due {when}. {B} has almost finished it and will send it to {A} at {time}.",
                ),
            ),
            Outcome(
                (
                    "B> I won't make it, {why1}. Can I have more time? | Not yet. {why1}. Could I get a few more days?",
                    "A> OK, but I need it {when2}. | All right, {when2} at the latest.",
                ),
                (
                    "{B} can't finish the {work} {when} because of {whyn}. {A} wants it {when2}.",
                    "The {work} is due {when} but {B} {why3}. {A} will get it {when2}.",
                ),
                good=False,
            ),
            Outcome(
                (
                    "B> I'm stuck. I still need the numbers. | I can't go on without the numbers.",
                    "C> I have the numbers. I'll send them at {time}. | I can help you with the numbers at {time}.",
                    "B> Thanks, {C}, then I'll finish it. | {C}, that would be great!",
                ),
                (
                    "The {work} is due {when}. {C} will send {B} the numbers at {time}.",
                    "{A} asks {B} about the {work}. {B} needs the numbers and {C} will send them at {time}.",
                ),
            ),
        ),
    ),
    Topic(
        "recipe",
        slots={
            "dish": "lasagne,apple pie,carrot cake,pumpkin soup,paella,curry,cheesecake,banana bread",
            "extra": "cinnamon,garlic,ginger,honey,lemon,butter,nutmeg,cream",
            "shop": "the bakery,the market,the corner shop,the supermarket,the farm shop",
        },
        opening=(
            "A> I want to make {dish} {when}. Do you have a recipe? | "
            "Could you give me your recipe for {dish}? I want to make it {when}.",
        ),
        asides=(
            ("B> How many people are you cooking for? | For how many people?", "A> For six. | Only for four."),
            ("B> Do you have a good oven? | Is your oven working again?", "A> Yes, it's brand new. | It is, luckily."),
            (
                "B> Any allergies? | Is there something they can't eat?",
                "A> No, they eat everything. | Nothing, luckily.",
            ),
        ),
        outcomes=(
            Outcome(
                (
                    "B> Sure, I'll send it to you. The secret is {extra}! | "
                    "Of course, it's easy. Don't forget the {extra}!",
                    "A> A lot of {extra}? | {extra}? Interesting!",
                    "B> Yes, it makes all the difference. | Trust me.",
                ),
                (
                    "{A} will make {dish} {when}. {B} gives {A} the recipe with {extra}.",
                    "{B} will send {A} a recipe for {dish}. The secret is {extra}.",
                ),
            ),
            Outcome(
                (
                    "B> Sorry, I always buy mine at {shop}. | No, I never make it. I get it at {shop}.",
                    "A> Really? Then I'll buy it there too. | Good idea, I'll do the same.",
                ),
                (
                    "{A} wants to make {dish} {when} but {B} has no recipe. {A} will buy it at {shop}.",
                    "{B} has no recipe for {dish}, so {A} will buy it at {shop}.",
                ),
            ),
            Outcome(
                (
                    "B> I have one, but let's cook together! | Let me come over and show you!",
                    "A> That would be lovely. At {time}? | Wonderful! Can you come at {time}?",
                    "B> Yes, and I'll bring the {extra}. | OK, I'll come and bring {extra}.",
                ),
                (
                    "{A} and {B} will make {dish} together {when} at {time}. {B} will bring {extra}.",
                    "{B} will help {A} to make {dish} {when} at {time} and bring {extra}.",
                ),
            ),
        ),
    ),
    Topic(
        "borrow",
        slots={"tool": "drill,ladder,tent,camera,suitcase,bike,projector,sewing machine"},
        opening=(
            "A> Can I borrow your {tool} {when}? | Could you lend me your {tool} {when}? | "
            "I need {a_tool} {when}. Could I use yours?",
        ),
        asides=(
            (
                "B> What do you need it for? | What happened to yours?",
                "A> Mine is broken. | I never had one of my own.",
            ),
            ("B> For how long? | How long do you need it?", "A> Just for a day. | Two days at most."),
            (
                "B> You know how to use it, right? | Have you used one before?",
                "A> Yes, many times. | Sure, I'll be careful.",
            ),
        ),
        outcomes=(
            Outcome(
                (
                    "B> Sure, you can pick it up at {time}. | No problem, come and get it at {time}.",
                    "A> I'll be there at {time}. | Fantastic, see you then.",
                ),
                (
                    "{B} will lend {A} {a_tool} {when}. {A} will pick it up at {time}.",
                    "{A} will borrow {B}'s {tool} {when} and pick it up at {time}.",
                ),
            ),
            Outcome(
                (
                    "B> I'm sorry, I need it myself. | Sorry, I'm using it then.",
                    "A> Do you know who else has one? | Oh no. Who could help me?",
                    "B> Ask {D}! | I think {D} has one.",
                ),
                (
                    "{A} wants to borrow {B}'s {tool} {when} but {B} needs it. {A} should ask {D}.",
                    "{B} can't lend {A} {a_tool} {when} and tells {A} to ask {D}.",
                ),
                good=False,
            ),
            Outcome(
                (
                    "B> Mine is broken. | I gave mine away.",
                    "C> You can have my {tool}! | I have one, {A}!",
                    "A> Great, {C}! Can we meet at {place}? | Thanks, {C}! Could you bring it to {place}?",
                    "C> Yes, at {place} at {time}. | OK, I'll be there at {time}.",
                ),
                (
                    "{C} will lend {A} {a_tool} {when}. They will meet at {place} at {time}.",
                    "{A} needs {a_tool} {when}. {B} can't help but {C} will bring one to {place} at {time}.",
                ),
            ),
        ),
    ),
    Topic(
        "pickup",
        slots={
            "city": "London,Paris,Berlin,Rome,Madrid,Vienna,Lisbon,Prague",
            "ride": "the bus,a taxi,the train,the night bus,the tram",
        },
        opening=(
            "A> I'm coming back from {city} {when}. Could you pick me up? | "
            "My flight from {city} lands {when}. Can you pick me up?",
        ),
        asides=(
            ("B> Did you have a good time there? | How was the trip?", "A> It was wonderful! | Great, but I'm tired."),
            (
                "B> Do you have much luggage? | How many bags do you have?",
                "A> Only one bag. | Two big bags, I'm afraid.",
            ),
            (
                "B> Did you buy anything nice? | Did you bring me something?",
                "A> You'll see! | Some chocolate, of course.",
            ),
        ),
        outcomes=(
            Outcome(
                (
                    "B> Of course! When do you arrive? | Sure, what time?",
                    "A> I arrive at {time}. | At {time}, if all goes well.",
                    "B> I'll wait for you there. | Good, look for my red car.",
                ),
                (
                    "{A} is coming back from {city} {when} at {time}. {B} will pick {A} up.",
                    "{B} will pick {A} up {when} at {time} when {A} comes back from {city}.",
                ),
            ),
            Outcome(
                (
                    "B> I can't, sorry. {why1}. | I would, but {why1}.",
                    "A> OK, then I'll take {ride}. | Never mind, I'll get {ride}.",
                ),
                (
                    "{B} can't pick {A} up {when} because of {whyn}. {A} will take {ride}.",
                    "{A} is coming back from {city} {when}. {B} {why3}, so {A} will take {ride}.",
                ),
                good=False,
            ),
            Outcome(
                (
                    "B> My car is at the garage. Maybe {C} can? | I can't drive. {C}, can you?",
                    "C> Yes, I can do it. When? | No problem! What time?",
                    "A> At {time}. You're the best, {C}! | {time}. Thank you so much, {C}!",
                ),
                (
                    "{A} is coming back from {city} {when}. {C} will pick {A} up at {time}.",
                    "{B} can't pick {A} up {when}, so {C} will do it at {time}.",
                ),
            ),
        ),
    ),
    Topic(
        "petsitting",
        slots={"pet": "dog,cat,rabbit,parrot,hamster,turtle"},
        opening=(
            "A> I'm going away {when}. Could you look after my {pet}? | "
            "Can you take care of my {pet} {when}? I have to leave town.",
        ),
        asides=(
            (
                "B> What does it eat? | How often do you feed it?",
                "A> Twice a day, it's easy. | I'll leave the food in the kitchen.",
            ),
            ("B> Is it friendly? | It won't bite, will it?", "A> It's very sweet. | Never, it loves people."),
            ("B> What's its name again? | How old is it now?", "A> It's Biscuit, remember? | It's only two years old."),
        ),
        outcomes=(
            Outcome(
                (
                    "B> I'd love to! | With pleasure, I love that {pet}!",
                    "A> I'll bring it to your place at {time}. | Can I bring it at {time}?",
                    "B> Yes, I'll be at home. | Good, I'll be waiting.",
                ),
                (
                    "{B} will look after {A}'s {pet} {when}. {A} will bring it at {time}.",
                    "{A} is going away {when} and {B} will take care of the {pet}. {A} will bring it at {time}.",
                ),
            ),
            Outcome(
                ("B> I can't, {why1}. | Sorry, {why1}.", "A> I see. I'll ask {D} then. | OK, I'll call {D}."),
                (
                    "{B} can't look after {A}'s {pet} {when} because of {whyn}. {A} will ask {D}.",
                    "{A} needs someone to look after the {pet} {when}. {B} {why3}, so {A} will ask {D}.",
                ),
                good=False,
            ),
            Outcome(
                (
                    "B> I'm allergic, sorry! | You know I'm allergic, right?",
                    "C> I can take the {pet}, {A}. | Give it to me, {A}! I love animals.",
                    "A> Wonderful, {C}! | Thank you, {C}, that's so kind!",
                ),
                (
                    "{C} will look after {A}'s {pet} {when} because {B} is allergic.",
                    "{A} is going away {when}. {B} is allergic, so {C} will take care of the {pet}.",
                ),
            ),
        ),
    ),
    Topic(
        "gift",
        slots={"gift": "watch,teapot,guitar,necklace,lamp,chess set,vase,cookbook"},
        opening=(
            "A> It's {D}'s birthday {when}. What shall we buy? | {D} has a birthday {when}. Any ideas for a gift?",
        ),
        asides=(
            (
                "B> What did we give last year? | What was it last time?",
                "A> A boring book, I think. | Just some flowers.",
            ),
            (
                "B> How much do you want to spend? | What is our budget?",
                "A> Not more than thirty euros. | Fifty would be fine.",
            ),
            ("B> Will there be a party? | Are we invited to a party?", "A> Yes, a small one. | I think so, at home."),
        ),
        outcomes=(
            Outcome(
                (
                    "B> How about {a_gift}? | I think {a_gift} would be nice.",
                    "A> Good idea! Can you buy it? | Lovely! Could you get it?",
                    "B> Yes, I'll get it at {place}. | Sure, they sell them near {place}.",
                ),
                (
                    "{A} and {B} will give {D} {a_gift} for the birthday {when}. {B} will buy it near {place}.",
                    "{D}'s birthday is {when}. {B} will buy {a_gift} near {place}.",
                ),
            ),
            Outcome(
                (
                    "B> I already bought {a_gift}. | I have something, {a_gift}.",
                    "A> Can it be from both of us? I'll pay half. | Oh! Can I pay half of it?",
                    "B> Yes, of course. | Sure, that's fair.",
                ),
                (
                    "{B} has bought {a_gift} for {D}'s birthday {when}. {A} will pay half.",
                    "{D}'s birthday is {when}. {B} has {a_gift} and {A} will pay half of it.",
                ),
            ),
            Outcome(
                (
                    "B> I don't know. {C}, any idea? | {C}, you know {D} better. What do you say?",
                    "C> Buy {a_gift}! | {D} has always wanted {a_gift}.",
                    "A> Great, {C}! Let's do that. | Perfect, let's all pay for it.",
                ),
                (
                    "{A}, {B} and {C} will buy {a_gift} for {D}'s birthday {when}.",
                    "{D}'s birthday is {when}. {C} suggests {a_gift}, so {A}, {B} and {C} will buy it.",
                ),
            ),
        ),
    ),
    Topic(
        "moving",
        slots={"stuff": "sofa,piano,wardrobe,fridge,desk,bookcase"},
        opening=(
            "A> I'm moving house {when}. Could you help me with the {stuff}? | "
            "We're moving to the new flat {when}. Can you help me carry the {stuff}?",
        ),
        asides=(
            ("B> Is there a lift? | Which floor is it?", "A> Third floor, no lift, sorry! | There is a lift, luckily."),
            (
                "B> How big is the new flat? | Do you like the new flat?",
                "A> It's small but lovely. | Yes, it has a balcony!",
            ),
            (
                "B> Have you packed everything? | Do you need boxes?",
                "A> Not yet, what a mess! | I have plenty of boxes.",
            ),
        ),
        outcomes=(
            Outcome(
                (
                    "B> Sure! When should I come? | Of course, when do you start?",
                    "A> We start at {time}. | Come at {time}, please.",
                    "B> OK, but you owe me a pizza! | Fine, I'll bring gloves.",
                ),
                (
                    "{A} is moving house {when}. {B} will come at {time} to help with the {stuff}.",
                    "{B} will help {A} to move the {stuff} {when} at {time}.",
                ),
            ),
            Outcome(
                (
                    "B> I hurt my back, so I can't. | My back is killing me, I can't lift anything.",
                    "A> Oh dear! I'll ask {D} instead. | Poor you! {D} may help me then.",
                ),
                (
                    "{A} is moving house {when}. {B} can't carry the {stuff} because of back pain, so "
                    "{A} will ask {D}.",
                    "{B} has back pain and can't help {A} with the {stuff} {when}. {A} will ask {D}.",
                ),
                good=False,
            ),
            Outcome(
                (
                    "B> I can't carry that, but I have a van! | Too heavy! But you can use my van.",
                    "A> A van would be great! | Really? That helps a lot!",
                    "B> I'll bring it {when} at {time}. | You can have it at {time}.",
                ),
                (
                    "{A} is moving house {when}. {B} will lend {A} a van at {time}.",
                    "{B} can't carry the {stuff} but {A} can use {B}'s van {when} at {time}.",
                ),
            ),
        ),
    ),
    Topic(
        "exam",
        slots={
            "subject": "maths,physics,history,biology,chemistry,French,German,geography",
            "study": "the library,the cafe,the school,the office,the park,the bookshop",
        },
        opening=(
            "A> The {subject} exam is {when}. Do you want to study together? | "
            "I'm so nervous about the {subject} exam {when}! Shall we study together?",
        ),
        asides=(
            (
                "B> Which chapters do we need? | What do we have to learn?",
                "A> The first five chapters. | Everything, I think.",
            ),
            (
                "B> Is it difficult? | Is the teacher strict?",
                "A> Very! Half of the class failed last year. | Not too bad, they say.",
            ),
            ("B> Have you started yet? | Have you read the book?", "A> Only a little. | No, I keep putting it off."),
        ),
        outcomes=(
            Outcome(
                (
                    "B> Yes, please! Where? | Good idea! Where shall we study?",
                    "A> At {study} at {time}? | How about {study}, at {time}?",
                    "B> See you there. | Good, I'll bring my notes.",
                ),
                (
                    "{A} and {B} will study for the {subject} exam at {study} at {time}.",
                    "{A} and {B} have a {subject} exam {when}. They will study at {study} at {time}.",
                ),
            ),
            Outcome(
                (
                    "B> I prefer to study alone. | Sorry, I study better alone.",
                    "A> Could you at least lend me your notes? | Can I have your notes then?",
                    "B> Yes, I'll send them at {time}. | Sure, you'll get them at {time}.",
                ),
                (
                    "{B} wants to study alone for the {subject} exam {when} but will send {A} the notes at {time}.",
                    "{A} has a {subject} exam {when}. {B} will send {A} the notes at {time}.",
                ),
            ),
            Outcome(
                (
                    "B> Didn't you hear? The exam was moved! | Good news! They moved the exam.",
                    "A> Really? To when? | What? When is it now?",
                    "B> It's {when2}. | It will be {when2}.",
                ),
                (
                    "The {subject} exam is not {when} but {when2}.",
                    "{B} tells {A} that the {subject} exam was moved to another day. It is {when2}.",
                ),
            ),
        ),
    ),
    Topic(
        "repair",
        slots={
            "thing": "dishwasher,washing machine,laptop,heating,shower,printer,oven,toaster",
            "price": "40 euros,60 euros,80 euros,100 euros,150 euros,200 euros",
        },
        opening=(
            "A> My {thing} is broken again! What should I do? | Help, the {thing} has stopped working! Any ideas?",
        ),
        asides=(
            (
                "B> Does it make a noise? | What exactly happens?",
                "A> It makes a strange noise. | Nothing happens at all.",
            ),
            ("B> How old is it? | Is it an old one?", "A> About eight years old. | I bought it two years ago."),
            (
                "B> Did you switch it off and on? | Is it plugged in?",
                "A> Of course, I'm not stupid! | Yes, I checked that first.",
            ),
        ),
        outcomes=(
            Outcome(
                (
                    "B> I can fix it {when}. | Let me have a look {when}.",
                    "A> You're an angel! What time? | That would be great. When exactly?",
                    "B> At {time}. | I'll come at {time}.",
                ),
                (
                    "{A}'s {thing} is broken. {B} will come {when} at {time} to fix it.",
                    "{B} will fix {A}'s {thing} {when} at {time}.",
                ),
            ),
            Outcome(
                (
                    "B> Call {D}, it cost me only {price}. | {D} repairs these things for {price}.",
                    "A> That's not bad. I'll call {when}. | Good to know! I'll call {when}.",
                ),
                (
                    "{A}'s {thing} is broken. {B} tells {A} to call {D}, who repairs it for {price}.",
                    "{A} will call {D} {when} because the {thing} is broken. It costs {price}.",
                ),
            ),
            Outcome(
                (
                    "B> It's too old. Just buy a new one. | Don't repair it, get a new one!",
                    "A> How much would that be? | Isn't that expensive?",
                    "B> You can get one for {price}. | I paid {price} for mine.",
                ),
                (
                    "{A}'s {thing} is broken. {B} tells {A} to buy a new one for {price}.",
                    "{B} thinks that {A} should buy a new {thing} for {price}.",
                ),
            ),
        ),
    ),
    Topic(
        "match",
        slots={"sport": "football,tennis,basketball,volleyball,hockey,handball"},
        opening=(
            "A> We have a {sport} match {when}. Can you play? | "
            "Our {sport} team needs one more player {when}. Are you free?",
        ),
        asides=(
            (
                "B> Who are we playing against? | Who is the other team?",
                "A> The team from the next town. | The champions, so be ready!",
            ),
            ("B> How did you do last time? | Did you win the last one?", "A> We lost badly. | We won, but only just."),
            (
                "B> Do I need new shoes for that? | What should I wear?",
                "A> Just the green shirt. | Your old shoes will do.",
            ),
        ),
        outcomes=(
            Outcome(
                (
                    "B> Yes, I'm ready! When does it start? | Of course! What time?",
                    "A> It starts at {time}. | At {time}, don't be late.",
                    "B> I'll be there early. | I won't be late!",
                ),
                (
                    "{B} will play {sport} with {A} {when} at {time}.",
                    "{A} and {B} have a {sport} match {when}. It starts at {time}.",
                ),
            ),
            Outcome(
                (
                    "B> I can't play, {why1}. | Sorry, not this time. {why1}.",
                    "A> What a pity! I'll ask {D}. | We need a player! I'll try {D}.",
                ),
                (
                    "{B} can't play {sport} {when} because of {whyn}. {A} will ask {D}.",
                    "{A} needs a player for the {sport} match {when}. {B} {why3}, so {A} will ask {D}.",
                ),
                good=False,
            ),
            Outcome(
                (
                    "B> I hurt my knee, but I'll come to watch. | My knee hurts. I can only watch.",
                    "C> I can play {sport} for {B}! | Then take me, I love {sport}!",
                    "A> Great, {C}! It's at {time}. | Welcome to the team, {C}! Be there at {time}.",
                ),
                (
                    "{B} hurt a knee, so {C} will play {sport} with {A} {when} at {time}.",
                    "{A} has a {sport} match {when} at {time}. {C} will play and {B} will watch.",
                ),
            ),
        ),
    ),
    Topic(
        "concert",
        slots={
            "music": "jazz,rock,folk,opera,blues,samba",
            "cost": "20 euros,25 euros,30 euros,35 euros,45 euros,50 euros",
        },
        opening=(
            "A> I have two tickets for the {music} concert {when}. Are you interested? | "
            "Do you want to come to the {music} concert with me {when}? I have a spare ticket.",
        ),
        asides=(
            ("B> Who is playing? | Is it a famous band?", "A> A new band, they are amazing. | It's a surprise!"),
            ("B> Are the seats good? | Where are the seats?", "A> Right in the middle! | In the second row!"),
            ("B> How did you get them? | I thought they were sold out!", "A> I was lucky. | I won them on the radio."),
        ),
        outcomes=(
            Outcome(
                (
                    "B> Yes! How much is the ticket? | I'd love that! What does it cost?",
                    "A> It's {cost}. | You can have it for {cost}.",
                    "B> OK, I'll take it. | Deal!",
                ),
                (
                    "{A} and {B} will go to the {music} concert {when}. The ticket costs {cost}.",
                    "{B} will buy {A}'s spare ticket for the {music} concert {when} for {cost}.",
                ),
            ),
            Outcome(
                (
                    "B> I don't like {music}, sorry. | {music} is not for me.",
                    "C> I love {music}! Can I have it? | I'll take it, {A}!",
                    "A> Sure, {C}, it's {cost}. | It's yours, {C}, for {cost}.",
                ),
                (
                    "{B} doesn't like {music}, so {C} will go to the concert with {A} {when}. The ticket costs {cost}.",
                    "{C} will buy {A}'s spare ticket for the {music} concert {when} for {cost}.",
                ),
            ),
            Outcome(
                (
                    "B> I'd love to, but {why1}. | Oh no, {why1}!",
                    "A> Pity! I'll sell it for {cost} then. | Then I'll sell it for {cost}.",
                ),
                (
                    "{B} can't go to the {music} concert {when} because of {whyn}. {A} will sell the "
                    "ticket for {cost}.",
                    "{A} has a spare ticket for the {music} concert {when} but {B} {why3}.",
                ),
                good=False,
            ),
        ),
    ),
    Topic(
        "shopping",
        slots={"food1": "milk,bread,eggs,cheese,apples,rice", "food2": "coffee,tomatoes,onions,pasta,yoghurt,potatoes"},
        opening=("A> I'm at the supermarket. Do we need anything? | I'm going shopping now. What shall I buy?",),
        asides=(
            (
                "B> Which supermarket are you at? | Are you at the big one?",
                "A> The small one on the corner. | The big one, it's so crowded!",
            ),
            ("B> Did you take a bag? | Do you have enough money?", "A> Yes, don't worry. | I hope so!"),
            (
                "B> Is there anything on sale? | Any good offers today?",
                "A> Chocolate is cheap today! | Nothing special.",
            ),
        ),
        outcomes=(
            Outcome(
                (
                    "B> Yes, {food1} and {food2}, please. | We need {food1} and {food2}.",
                    "A> OK. I'll be home at {time}. | No problem, see you at {time}.",
                ),
                (
                    "{A} will buy {food1} and {food2} and come home at {time}.",
                    "{B} asks {A} to buy {food1} and {food2}. {A} will be home at {time}.",
                ),
            ),
            Outcome(
                (
                    "B> Just {food1}. I have already bought {food2}. | We have enough {food2}. Only {food1}, please.",
                    "A> Only {food1}, got it. | All right, just {food1}.",
                ),
                (
                    "{A} is shopping and will only buy {food1}, because they have enough {food2}.",
                    "{A} will buy {food1} but no {food2}.",
                ),
            ),
            Outcome(
                (
                    "B> I need {food1}. {C}, what about you? | {food1}, please. And you, {C}?",
                    "C> Some {food2} for me. | Please get me {food2}.",
                    "A> Fine, {food1} and {food2}. | OK, I'll get both.",
                ),
                (
                    "{A} will buy {food1} for {B} and {food2} for {C}.",
                    "{A} is shopping. {B} needs {food1} and {C} wants {food2}.",
                ),
            ),
        ),
    ),
    Topic(
        "doctor",
        slots={"pain": "back,head,knee,shoulder,stomach,tooth,ankle,neck", "soup": "soup,tea,fruit,oranges,medicine"},
        opening=("A> My {pain} has been hurting for days. | I feel terrible, my {pain} hurts so much.",),
        asides=(
            (
                "B> Did you take anything for it? | Have you taken any pills?",
                "A> Yes, but they don't help. | No, I hate pills.",
            ),
            (
                "B> How did that happen? | Since when?",
                "A> I don't know, I just woke up with it. | I think I slept badly.",
            ),
            (
                "B> Do you have a fever? | Are you in bed?",
                "A> No, but I'm very tired. | I'm on the sofa with some tea.",
            ),
        ),
        outcomes=(
            Outcome(
                (
                    "B> You should see a doctor. | Go to the doctor!",
                    "A> I have an appointment {when} at {time}. | I'm seeing one {when} at {time}.",
                    "B> I'll drive you there. | Let me come with you.",
                ),
                (
                    "{A}'s {pain} hurts. {A} will see a doctor {when} at {time} and {B} will come along.",
                    "{A} has a doctor's appointment {when} at {time} about {pain} pain. {B} will take {A} there.",
                ),
            ),
            Outcome(
                (
                    "B> Call Doctor {D}, you can trust me on that. | Doctor {D} helped me a lot.",
                    "A> I'll call {when}. | Thanks, I'll make an appointment {when}.",
                ),
                (
                    "{A}'s {pain} hurts. {B} recommends Doctor {D} and {A} will call {when}.",
                    "{B} tells {A} to see Doctor {D} about {pain} pain. {A} will call {when}.",
                ),
            ),
            Outcome(
                (
                    "B> Did you see a doctor? | What does the doctor say?",
                    "A> They are so busy, I have to wait. I can only go {when}. | They can only see me {when}.",
                    "B> Then stay in bed! I'll bring you {soup}. | Poor you. I'll bring some {soup}.",
                ),
                (
                    "{A}'s {pain} hurts but the doctor can only see {A} {when}. {B} will bring {soup}.",
                    "{A} can only see a doctor {when}. {B} will bring {A} some {soup}.",
                ),
            ),
        ),
    ),
    Topic(
        "late",
        opening=(
            "A> I'm going to be late for the meeting at {venue}. | "
            "Sorry, I won't be at {venue} in time for the meeting!",
        ),
        slots={
            "delay": "the traffic,a late train,a flat tyre,the snow,an accident,a long call",
            "venue": "the office,the library,the town hall,the school,the bank,the museum",
        },
        asides=(
            ("B> Did you tell the boss? | Does the boss know?", "A> Not yet, could you do it? | Yes, I sent an email."),
            ("B> Again? | You're always late!", "A> I know, I'm so sorry. | I feel awful about it."),
            ("B> Where are you now? | Are you far away?", "A> Still at home. | On the main road."),
        ),
        outcomes=(
            Outcome(
                (
                    "B> What happened? | Why is that?",
                    "A> It's because of {delay}. I'll be there at {time}. | It's {delay}. I can make it at {time}.",
                    "B> OK, we'll wait. | Fine, we won't start without you.",
                ),
                (
                    "{A} will be late for the meeting at {venue} because of {delay}. {B} will wait until {time}.",
                    "{A} will be at {venue} at {time} because of {delay}. {B} will wait.",
                ),
            ),
            Outcome(
                (
                    "B> Don't worry, the meeting was moved. | Relax, they moved the meeting.",
                    "A> Really? When is it? | Lucky me! To when?",
                    "B> It's {when} at {time}. | {when} at {time}, same place.",
                ),
                (
                    "{A} is late but the meeting at {venue} was moved. It is {when} at {time}.",
                    "{B} tells {A} that the meeting at {venue} is {when} at {time}.",
                ),
            ),
            Outcome(
                (
                    "B> We can't wait, we have to start. | Sorry, we'll start without you.",
                    "C> I'll write everything down for you, {A}. | You can have my notes, {A}.",
                    "A> Thank you, {C}. It's because of {delay}. | {C}, you're a star. It was {delay}.",
                ),
                (
                    "{A} will be late for the meeting because of {delay}. {B} won't wait but {C} will take notes.",
                    "{A} will miss the meeting at {venue} because of {delay}. {C} will take notes.",
                ),
                good=False,
            ),
        ),
    ),
    Topic(
        "interview",
        slots={
            "job": "teacher,nurse,waiter,designer,driver,cook,translator,accountant",
            "drink": "a coffee,a beer,a pizza,an ice cream,a drink",
        },
        opening=(
            "A> Did I tell you that I applied for a job as {a_job}? | "
            "Guess what, I had an interview for a job as {a_job}!",
        ),
        asides=(
            ("B> Were you nervous? | Did you prepare for it?", "A> My hands were shaking! | Yes, for a whole week."),
            ("B> Is the pay good? | Will you earn more?", "A> A bit more than now. | Yes, much more!"),
            (
                "B> Are the people nice there? | What are the people like?",
                "A> They seem really friendly. | Very kind and young.",
            ),
        ),
        outcomes=(
            Outcome(
                (
                    "B> And? Did you get it? | So, how did it go?",
                    "A> I got it! I start {when}. | They took me! I begin {when}.",
                    "B> Congratulations, {A}! | Wow, I knew it!",
                ),
                (
                    "{A} got a job as {a_job} and starts {when}. {B} is happy for {A}.",
                    "{A} tells {B} about a new job as {a_job}. {A} starts {when}.",
                ),
            ),
            Outcome(
                (
                    "B> And what did they say? | Did they like you?",
                    "A> No, they took someone else. | They said no.",
                    "B> I'm so sorry. Let's go for {drink} {when}. | Their loss! Let me buy you {drink} {when}.",
                ),
                (
                    "{A} didn't get the job as {a_job}. {B} will buy {A} {drink} {when}.",
                    "{A} applied for a job as {a_job} but they said no. {A} and {B} will go for {drink} {when}.",
                ),
                good=False,
            ),
            Outcome(
                (
                    "B> When will you know? | When do they call you?",
                    "A> They will call me {when}. | I'll know {when}.",
                    "B> I keep my fingers crossed! | Good luck, {A}!",
                ),
                (
                    "{A} had an interview for a job as {a_job} and will know the result {when}.",
                    "{A} is waiting for a call {when} about a job as {a_job}. {B} wishes {A} luck.",
                ),
            ),
        ),
    ),
    Topic(
        "dinner",
        slots={
            "cuisine": "Italian,Thai,Greek,Indian,Mexican,Turkish,Japanese,Chinese",
            "time": "6,7,8,9,half past six,half past nine",
        },
        opening=(
            "A> Shall we have dinner at the new {cuisine} restaurant {when}? | "
            "There's a new {cuisine} restaurant near {place}. Shall we try it {when}?",
        ),
        asides=(
            (
                "B> Is the food any good? | What do people say about it?",
                "A> Everybody says it's delicious. | My sister loved it.",
            ),
            ("B> Can we bring the kids? | Do they have a terrace?", "A> I think so. | Yes, and live music."),
            ("B> I'm hungry already! | Now you made me hungry!", "A> Me too! | Same here, I skipped lunch."),
        ),
        outcomes=(
            Outcome(
                (
                    "B> Yes, please! Will you book a table? | I'm in! Can you book a table?",
                    "A> Sure, for {time}. | OK, I'll book it for {time}.",
                    "B> I can't wait. | Perfect!",
                ),
                (
                    "{A} and {B} will have dinner at {a_cuisine} restaurant {when}. {A} will book a table for {time}.",
                    "{A} will book a table at the new {cuisine} restaurant for {time} {when}.",
                ),
            ),
            Outcome(
                (
                    "B> I don't like {cuisine} food. | {cuisine} food? Not again!",
                    "A> What would you like then? | OK, you choose.",
                    "B> Let's go to {a_cuisine2} place. | I'd rather have {cuisine2} food.",
                ),
                (
                    "{A} suggests {a_cuisine} restaurant {when} but {B} prefers {cuisine2} food.",
                    "{B} doesn't like {cuisine} food and wants to have {cuisine2} food {when}.",
                ),
            ),
            Outcome(
                (
                    "B> Sorry, {why1}. | Not {when}, {why1}.",
                    "A> Can you come {when2}? | Shall we go {when2} instead?",
                    "B> Yes, {when2} at {time}. | OK, {when2} at {time}.",
                ),
                (
                    "{A} and {B} will go to {a_cuisine} restaurant {when2} at {time} because {B} {why3}.",
                    "{B} {why3}, so {A} and {B} will have {cuisine} food {when2} at {time}.",
                ),
            ),
        ),
    ),
    Topic(
        "selling",
        slots={
            "ware": "car,bed,scooter,kayak,television,table,mirror,armchair",
            "offer": "40 euros,60 euros,80 euros,100 euros,150 euros,200 euros",
        },
        opening=(
            "A> I want to sell my {ware}. Are you interested? | "
            "Do you know anybody who needs {a_ware}? I'm selling mine.",
        ),
        asides=(
            ("B> Why are you selling it? | Don't you like it any more?", "A> I never use it. | I have no room for it."),
            ("B> Is it in good shape? | Is anything wrong with it?", "A> It's like new. | It has a few scratches."),
            (
                "B> Can you send me a photo? | What colour is it?",
                "A> It's white, I'll send a photo. | Wait, I'll take a picture.",
            ),
        ),
        outcomes=(
            Outcome(
                (
                    "B> I am! How much do you want? | I could use it! What's the price?",
                    "A> {offer}. | I was thinking of {offer}.",
                    "B> Deal! I'll come for it {when}. | OK, I'll pick it up {when}.",
                ),
                (
                    "{B} will buy {A}'s {ware} for {offer} and pick it up {when}.",
                    "{A} is selling {a_ware}. {B} will buy it for {offer} and come {when}.",
                ),
            ),
            Outcome(
                (
                    "B> Not me, but {D} needs {a_ware}. | I have one, but {D} is looking for one.",
                    "A> Great, I'll call {D} {when}. | Good to know, I'll ask {D} {when}.",
                ),
                (
                    "{A} is selling {a_ware}. {B} doesn't need it but {A} will call {D} {when}.",
                    "{B} tells {A} that {D} needs {a_ware}. {A} will call {D} {when}.",
                ),
            ),
            Outcome(
                (
                    "B> What's the price? | How much is it?",
                    "A> {offer}. | I'd like {offer} for it.",
                    "B> That's too expensive for me. | Sorry, I can't afford that.",
                    "C> I'd pay {offer} for it! | I'll take it, {A}!",
                    "A> It's yours, {C}! | Great, {C}, come and get it!",
                ),
                (
                    "{A} is selling {a_ware} for {offer}. {B} can't afford it, so {C} will buy it.",
                    "{C} will buy {A}'s {ware} for {offer} because it is too expensive for {B}.",
                ),
            ),
        ),
    ),
    Topic(
        "holiday",
        slots={
            "land": "Italy,Norway,Greece,Iceland,Portugal,Scotland,Croatia,Morocco",
            "month": "April,May,June,July,August,September",
            "stay": "a tent,a hotel,a hostel,a cabin,a castle,a caravan",
        },
        opening=(
            "A> Let's go to {land} in {month}! | I'm thinking of a holiday in {land} in {month}. Do you want to come?",
        ),
        asides=(
            (
                "B> Have you been there before? | Do you know the place?",
                "A> No, but I've seen pictures. | Once, as a child.",
            ),
            ("B> How long do you want to stay? | For how many days?", "A> For ten days. | One week, I think."),
            ("B> Can we go by train? | How do we get there?", "A> I found a cheap flight. | By train, it's so pretty."),
        ),
        outcomes=(
            Outcome(
                (
                    "B> Yes! Where would we sleep? | I'm in! Where can we stay?",
                    "A> In {stay}. | I found {stay}.",
                    "B> That sounds like an adventure! | How lovely!",
                ),
                (
                    "{A} and {B} will go to {land} in {month} and stay in {stay}.",
                    "{A} and {B} are planning a holiday in {land} in {month}. They will sleep in {stay}.",
                ),
            ),
            Outcome(
                (
                    "B> I've no holidays in {month}. | I have to work in {month}.",
                    "A> When are you free? | And when could you go?",
                    "B> In {month2}. | {month2} would be fine.",
                ),
                (
                    "{A} and {B} will go to {land} in {month2} because {B} has to work in {month}.",
                    "{B} can't go to {land} in {month}, so {A} and {B} will go in {month2}.",
                ),
            ),
            Outcome(
                (
                    "B> I'd rather go to {land2}. | What about {land2} instead?",
                    "C> Yes, {land2} is better! | I vote for {land2}, too!",
                    "A> All right, {B} and {C}, you win. | OK, two against one!",
                ),
                (
                    "{A} wants to go to {land} in {month} but {B} and {C} prefer {land2}.",
                    "{A}, {B} and {C} will go to {land2} in {month} and not to {land}.",
                ),
            ),
        ),
    ),
)

NEWS: tuple[News, ...] = (
    News(
        (
            "A> By the way, I signed up for a {course} course! | "
            "Oh, I almost forgot, I'm taking a {course} course now!",
            "B> That's exciting! Is it hard? | Good for you! Do you like it?",
            "A> It's hard but fun. | I love it so far.",
        ),
        ("{A} is taking a {course} course.", "{A} has signed up for a {course} course."),
        {"course": "pottery,yoga,Spanish,sailing,painting,first aid"},
    ),
    News(
        (
            "B> I have news too. I got {a_baby}! | Guess what, we have {a_baby} now!",
            "A> How cute! Can I come and see it? | Oh, I want to see it!",
            "B> Any time you like. | Sure, it loves visitors.",
        ),
        ("{B} has got {a_baby}.", "{B} has {a_baby} now."),
        {"baby": "puppy,kitten,goldfish,pony,budgie"},
    ),
    News(
        (
            "B> By the way, {E} is getting married {when3}! | Did you hear that {E} is getting married {when3}?",
            "A> No way! I'm so happy for them! | Really? I had no idea!",
            "B> Yes, it was a surprise for everybody. | I know, it's amazing.",
        ),
        ("{E} is getting married {when3}.",),
    ),
    News(
        (
            "A> Did you hear about {E}? | Oh, have you talked to {E}?",
            "B> No, what happened? | Not for weeks, why?",
            "A> {E} moved to {town}! | {E} found a job in {town} and moved there!",
            "B> Wow, that's far away. | I didn't expect that.",
        ),
        ("{E} has moved to {town}.", "{E} lives in {town} now."),
        {"town": "Oslo,Dublin,Boston,Tokyo,Sydney,Toronto"},
    ),
    News(
        (
            "B> Have you seen the new {show} series? | I'm watching a {show} series now. Have you seen it?",
            "A> Not yet. Is it good? | No, should I?",
            "B> You have to watch it! | Yes, I couldn't stop watching!",
        ),
        ("{B} recommends a {show} series.", "{B} likes a new {show} series."),
        {"show": "detective,vampire,cooking,medical,space,pirate"},
    ),
    News(
        (
            "A> I started {hobby}, by the way. | Did I tell you that I started {hobby}?",
            "B> You? I can't believe it! | Seriously? Since when?",
            "A> Two weeks ago. It's good for me. | Since last month. You should try it!",
        ),
        ("{A} has started {hobby}.",),
        {"hobby": "running,knitting,gardening,fishing,boxing,baking"},
    ),
)

# Mostly the one who raises the matter says hello first, but not always.
GREETINGS = (
    (
        "A> Hi {B}! | Hey {B}! | Hello {B}! | Hi {B}, do you have a minute? | {B}, are you there?",
        "B> Hi {A}! | Hey {A}, what's up? | Hello {A}! | Sure, {A}, what is it? | Yes, {A}, I'm here.",
    ),
    (
        "B> Hi {A}! | Hey {A}, any news? | Hello {A}!",
        "A> Hi {B}, good that you write! | Hey {B}! | Hello {B}, you come just in time!",
    ),
)

# After the outcome: (A's and B's words if B spoke last, B's words if A spoke last).
CLOSING_GOOD = (
    ("A> Great! | Super! | Thanks, {B}! | Wonderful, {B}!", "B> Any time, {A}! | Perfect. | All good. | :)"),
    ("B> Great! | Perfect! | All right. | OK, {A}!",),
)
CLOSING_BAD = (
    (
        "A> Thanks anyway, {B}. | Never mind. | It's OK, {B}.",
        "B> Next time, {A}! | I'm really sorry, {A}. | Thanks for understanding.",
    ),
    ("B> Sorry again! | I'm really sorry, {A}. | Thanks for understanding.",),
)

GOODBYES = (
    "A> Bye, {B}! | See you, {B}! | Take care, {B}! | I have to run, bye!",
    "B> Bye, {A}! | See you soon, {A}! | Bye! | Take care!",
)

# Small talk before the matter: nothing here belongs in a summary.
WARM_UP: tuple[tuple[str, ...], ...] = (
    (
        "A> How are you? | How are you doing? | How is it going?",
        "B> I'm fine, thanks. And you? | Not bad, and you? | Great! How about you?",
        "A> I'm OK. | Can't complain. | Busy as always.",
    ),
    (
        "A> What are you doing? | Are you busy?",
        "B> Nothing special, just reading. | I'm making some tea. | Just cleaning the kitchen.",
    ),
    (
        "B> Long time no see! | I haven't heard from you for a while!",
        "A> I know, I've been so busy. | True, life has been crazy.",
    ),
    (
        "B> What a day! It's raining cats and dogs here. | It's so hot today, I'm melting!",
        "A> Same here. I haven't left the house all day. | I know, I hate this weather.",
    ),
    (
        "A> Did you sleep well? | You look tired in your last photo!",
        "B> Not really, the neighbours had a party. | I need more coffee, that's all.",
        "A> Poor you! | Oh, I know that feeling.",
    ),
    (
        "B> How is your family? | How are the kids?",
        "A> They're all well, thank you. | Everybody is fine, the little one is growing so fast.",
        "B> Glad to hear that. | Give them a hug from me.",
    ),
    (
        "B> I was just thinking about you! | Funny, I wanted to write to you too!",
        "A> Really? Great minds think alike. | Ha ha, that's telepathy.",
    ),
    (
        "A> How was your day? | How was work?",
        "B> Long and boring. | Pretty good, the boss was in a good mood for once.",
        "A> I see. | Better than mine, then.",
    ),
)

# Small talk after the matter, for the dialogues that run on.
RUN_ON: tuple[tuple[str, ...], ...] = (
    (
        "A> What are you having for lunch? | What are you eating today?",
        "B> Just a salad, I'm on a diet again. | Leftovers from yesterday, nothing fancy.",
        "A> Sounds healthy. | Enjoy your meal!",
    ),
    (
        "B> Have you read the news today? | Did you see the news?",
        "A> No, I don't want to know. | Yes, the world has gone mad.",
    ),
    (
        "A> I'm so tired today, I could sleep for a week. | I didn't sleep at all last night.",
        "B> You should go to bed early for once. | Drink some coffee!",
        "A> Easy to say with two small kids! | I've had three cups already.",
    ),
    (
        "B> Do you remember our old teacher? | I saw our old teacher in the street!",
        "A> The one with the funny hat? | Of course, who could forget that voice?",
        "B> Exactly! Still the same as twenty years ago. | Yes! We talked for almost an hour.",
    ),
    (
        "A> My neighbours are so loud again. | They are building something next door again.",
        "B> Talk to them! | Oh no, that must be annoying.",
        "A> I did, but they just laughed. | I'm used to it by now.",
    ),
    (
        "B> I'm looking at old photos right now. | I found some old photos of us!",
        "A> Oh, please send me some! | I hope nobody else can see them!",
        "B> You had such long hair! | We look so young, it's hard to believe.",
    ),
    (
        "A> Is it cold at your place too? | What is the weather like there?",
        "B> It's snowing a little. | Sunny, but windy.",
        "A> Here it's just grey. | I want summer back!",
    ),
    (
        "B> I really need a holiday. | I can't wait for the weekend.",
        "A> Who doesn't? | Same here, this week never ends.",
    ),
    (
        "A> Ha ha, I just spilled coffee all over the table. | I just dropped my sandwich!",
        "B> Oh no! Is everything all right? | Classic! That could only happen to you.",
        "A> Yes, but what a mess! | I'm laughing, so it's fine.",
    ),
    (
        "B> The internet is so slow today. | My phone is almost dead, sorry if I'm slow.",
        "A> Mine is the same. | No worries, take your time.",
    ),
    (
        "A> Your last message made me laugh. | I'm still laughing about your joke.",
        "B> I'm glad! | I have many more of those.",
    ),
    (
        "B> I should really clean my flat. | My flat looks like a battlefield.",
        "A> Mine too, let's not talk about it! | Just close the door and have a cup of tea.",
    ),
)

# Sentences that make a chatty speaker's turn longer.
PADDING = (
    "To be honest, I've been thinking about it the whole day.",
    "You know how it is with me.",
    "Sorry for the slow answer, I was on the phone.",
    "It has been such a crazy week for all of us.",
    "Honestly, I had a feeling that you would say that.",
    "I really mean it, you can believe me.",
    "I'm in such a good mood today, as you can see.",
    "I hope everything is all right on your side.",
    "My head is full of a hundred things at the moment.",
    "Somebody was at the door, but now I'm back.",
    "I just sat down with a big cup of tea.",
    "Life is never boring, that's for sure.",
    "I'm typing this on the bus, so forgive my mistakes.",
    "You always make me smile, do you know that?",
)
