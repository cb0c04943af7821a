"""The stock of chat: topics, slots of near-equal words, and sentence patterns made of them."""

# (name, what it does): every name is singular, so that all patterns agree with it.
TOPICS = {
    "a loop": "repeats a block of code",
    "a list": "keeps values in order",
    "a function": "gives a name to some code",
    "a class": "keeps data and methods together",
    "a string": "holds text",
    "a variable": "gives a name to a value",
    "a dictionary": "finds a value by its key",
    "a set": "keeps each value once",
    "a tuple": "holds values that stay fixed",
    "a condition": "chooses between two ways",
    "a comment": "tells the reader why",
    "a test": "checks what the code does",
    "a module": "keeps related code in one file",
    "a default": "stands in when no value is given",
    "a bug": "makes code do the wrong thing",
    "an index": "names a place in a list",
    "an error": "says that something went wrong",
    "a return value": "hands back the result",
    "recursion": "lets a function call itself",
    "indentation": "shows which lines belong together",
    "sorting": "puts values in order",
    "counting": "tells how many there are",
    "addition": "puts two amounts together",
    "subtraction": "takes one amount from another",
    "multiplication": "adds the same number many times",
    "division": "splits an amount into equal parts",
    "rounding": "gives up a little detail",
    "guessing": "gives a first rough number",
    "a remainder": "is what is left after sharing",
    "a fraction": "names a part of a whole",
    "an average": "evens out many numbers",
    "a total": "puts all amounts into one",
    "a number line": "shows numbers as places",
    "a times table": "keeps small products at hand",
    "a budget": "plans where the coins go",
    "a word problem": "hides a sum in a story",
    "paper": "keeps the steps in sight",
    "practice": "makes each step quicker",
}
HOBBIES = (
    "chess", "gardening", "cooking", "painting", "running", "music", "football", "sewing", "fishing",
    "cycling", "reading", "dancing", "baking", "hiking", "drawing", "singing", "swimming", "pottery",
)  # fmt: skip

_WHO = "[people|beginners|teachers|friends|students|builders|writers|cooks|children|careful readers]"
_OFTEN = "[often|mostly|usually|as a rule|commonly|at times|now and then|in general|sometimes|on most days]"
_USE = "[use|meet|need|like|try|trust|want|pick|enjoy|reach for]"
_WHEN = "[when|while|as soon as|once|whenever|because|just as|after|even if|before]"
_TASK = "[the work|a plan|the day|a task|the page|a story|the game|a shop|the puzzle|a lesson]"
_GETS = "[gets|feels|grows|looks|becomes|seems|turns]"
_BAD = "[long|busy|large|dull|odd|hard|messy|slow|strange|dark]"
_GOOD = "[calm|clear|short|simple|neat|bright|quick|fair|tidy|fresh]"
_GIVES = "[saves|gives|buys|brings|earns|leaves|offers|grants]"
_WHOM = "[you|us|me|them|people|everyone|my team|a friend]"
_BOON = "[time|room|order|peace|hope|trust|ideas|a clear view|some rest|good habits|a fresh start|less worry]"
_DURING = "[in|after|before|during|around|through]"
_TIMES = "[the morning|the end|a long day|the summer|the evening|a busy week|the winter|a quiet hour]"
_LIKE = "[a bit like|close to|much like|not far from|almost|a cousin of|as good as|something like]"
_THING = "[a map|a ladder|a bridge|a garden|a clock|a recipe|a small engine|a drawer|a lamp|a song|a river|a key]"
_WITH = "[with|without|next to|behind|under|above|beside|near]"
_DETAIL = "[a red door|two wheels|old stones|a small bell|many rooms|a warm light|no lid|soft ground|a long rope]"
_SLOW = "[slowly|gently|with care|step by step|in small bites|with a smile|without fear|out loud|twice|alone]"
_VERB = "[read|draw|say|build|test|write|explain|copy|change|sketch|repeat|check]"
_BIT = "[the first part|one line|a tiny case|the numbers|each step|your idea|the last bit|a short note|every word]"
_THEN = "[then|next|after that|later|soon|right away|at last|in turn]"
_REST = "[rest|smile|compare|count again|ask a friend|go on|look back|start over|take a walk|have some tea]"
_I = "[I think|I feel|I say|I find|I believe|I guess|I hope|to me|in my view|if you ask me]"
_MAYBE = "[maybe|perhaps|surely|of course|no doubt|likely|with luck|in truth|for once|as always]"

OPENINGS = (
    "[Well|Sure|Right|Gladly|Good question|Of course|Oh|Let me see|Happy to help|Fine], {topic} {does}",
    "[In short|Simply put|Put plainly|At heart|In a word|Most of all|First of all|As I see it], {topic} {does}",
    f"{_I} {{topic}} {{does}}",
    f"{_OFTEN.replace('[often|', '[').capitalize()} {_WHO} {_USE} {{topic}}",
    f"[See|Take|Treat|Picture|Think of] {{topic}} as {_THING} {_WITH} {_DETAIL}",
    f"[For me|For many|For some|For most of us|At school|At work|At home] {{topic}} is {_LIKE} {_THING}",
)
BODIES = (
    f"Many {_WHO} {_OFTEN} {_USE} it {_WHEN} {_TASK} {_GETS} {_BAD}",
    f"It {_GIVES} {_WHOM} {_BOON} {_DURING} {_TIMES}",
    f"Without it {_TASK} {_OFTEN} {_GETS} {_BAD}, and with it {_GOOD}",
    f"{_MAYBE.replace('[m', '[M', 1)} it is {_LIKE} {_THING} {_WITH} {_DETAIL}",
    f"You can {_VERB} {_BIT} {_SLOW}, {_THEN} {_REST}",
    f"{_I}: {_VERB} {_BIT} {_DURING} {_TIMES} and {_MAYBE} {_REST}",
    f"My {_GOOD} rule is to {_VERB} {_BIT} {_WHEN} {_TASK} {_GETS} {_BAD}",
    f"[Some|Most|Few|Old|Young|Wise|Shy|Busy] {_WHO} {_VERB} {_BIT} {_SLOW} and {_THEN} {_REST}",
    f"A {_GOOD} way is to {_VERB} {_BIT} {_DURING} {_TIMES}",
    f"When {_TASK} {_GETS} {_BAD}, it {_OFTEN} {_GIVES} {_WHOM} {_BOON}",
)
CLOSINGS = (
    "",
    f"[Try|Enjoy|Keep|Trust|Test|Use|Love|Share] it {_SLOW} {_DURING} {_TIMES}",
    f"[That|This|It all] {_GETS} {_GOOD} {_WHEN} you {_REST}",
    f"Now {_VERB} {_BIT} and {_REST}",
    f"[Is|Was] that {_GOOD} [enough|so far|for now|to hear] for {_WHOM}?",
    f"{_I}, {_MAYBE}, that {_GIVES} {_WHOM} {_BOON}",
)
FEELINGS = (
    f"[That|This|Such a day|Such a page|The start] {_OFTEN} {_GETS} {_BAD}, {_MAYBE}",
    f"[Do not worry|Take heart|Be patient|Stay calm|Be brave|Cheer up|No fear]: {_TASK} {_OFTEN} {_GETS} {_GOOD}",
    f"Many {_WHO} [feel|think|say|know|fear|write] {_OFTEN} that it {_GETS} {_BAD}",
)
STORIES = (
    "[One day|Once|Long ago|Last spring|Some time ago|On a wet day|At dawn] {name} "
    f"[found|met|lost|drew|saw|wanted|tried] {{topic}} {_WITH} {_DETAIL}",
    f"{{name}} {_OFTEN} [dreamed|talked|wrote|sang|asked|laughed] about {{topic}} {_DURING} {_TIMES}",
    f"[A cook|A child|A sailor|A king|A teacher|A fox|A baker|A clever bird] {_WITH} {_DETAIL} "
    "[showed|sold|gave|taught|promised|lent] {name} {topic}",
)
DEEDS = (
    f"Then {_TASK} [grew|felt|looked|became|seemed] {_BAD}, so {{name}} had to {_VERB} {_BIT} {_SLOW}",
    f"[A friend|The teacher|An old man|A neighbor|The captain|A cousin] said: {_VERB} {_BIT} {_SLOW}, {_THEN} {_REST}",
    f"It was {_LIKE} {_THING} {_WITH} {_DETAIL}",
    f"Nobody could {_VERB} {_BIT} {_DURING} {_TIMES}, but {{name}} could {_REST}",
)
ENDS = (
    f"[In the end|At last|Since then|That night|From then on|So|Years later] {_TASK} "
    f"[was|felt|looked|became|stayed] {_GOOD}, and {{name}} could {_REST}",
    f"[In the end|At last|Since then|That night|From then on|So|Years later] it [gave|brought|left|earned] "
    f"{{name}} {_BOON}",
)
REASONS = (
    f"it {_GIVES} {_WHOM} {_BOON} {_DURING} {_TIMES}",
    f"{_TASK} {_GETS} {_GOOD} {_WHEN} you {_REST}",
    f"{_WHO} {_OFTEN} {_USE} it {_SLOW}",
    f"it is {_LIKE} {_THING} {_WITH} {_DETAIL}",
)
WELCOMES = (
    "[Hello|Hi|Welcome|Good day|Nice to meet you|Hey there|Greetings], {name}",
    "[Glad|Happy|Pleased|Delighted] to [meet|see|greet|hear] you, {name}",
)
ON_HOBBIES = (
    f"{{hobby}} {_OFTEN} {_GIVES} {_WHOM} {_BOON} {_DURING} {_TIMES}",
    f"{_I} {{hobby}} is {_LIKE} {_THING} {_WITH} {_DETAIL}",
    f"Many {_WHO} {_OFTEN} {_USE} {{hobby}} {_WHEN} {_TASK} {_GETS} {_BAD}",
)
OFFERS = (
    f"[Shall|Should|Could|May] we {_VERB} {_BIT} {_DURING} {_TIMES}?",
    "[Shall|Should|Could|May] we [try|do|start|share|discuss] [a sum|some code|a puzzle|a loop|small numbers|a test]?",
    f"We can {_VERB} {_BIT} {_SLOW} and {_THEN} {_REST}",
)
THANKED = (
    "[You are welcome|No trouble|Any time|My pleasure|Glad it helped|Not at all|With joy], {name}",
    f"[Good|Great|Lovely|Fine|Splendid|Nice]: {_TASK} {_GETS} {_GOOD} {_WHEN} you {_REST}",
)
