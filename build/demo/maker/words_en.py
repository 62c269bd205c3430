"""English word lists for the grammar in `text.py`. Plain data: no code beyond splitting."""

NOUNS = """
apple arm artist aunt baby bag baker balcony ball banana bank barn basket bathroom battery beach
bear bed bedroom bee bell belt bench bicycle bird blanket boat bone book boot border boss bottle
bowl box boy branch bread breakfast brick bridge broom brother brush bucket bug building bus
business butter button cabin cabinet cage cake calendar camel camera camp candle candy canoe
captain car carpet carrot castle cat ceiling chain chair chapter cheese cherry chicken chimney
church circle city class clerk clock cloth cloud coach coat coffee coin collar college color comb
computer cook cookie copper corner cottage cotton couch cousin cover cow cradle crowd crown cup
cupboard curtain customer dad dancer daughter desert desk dinner doctor dog doll dollar donkey
door dragon drawer dream dress driver drum duck eagle ear earth edge egg elephant elevator engine
engineer envelope evening event eye face factory family fan farm farmer father feather fence field
finger fire fish fisherman flag floor flower fly folder food foot forest fork fox frame freezer
fridge friend frog fruit furniture game garage garden gate gift giraffe girl glass glove goat gold
grandfather grandmother grape grass group guest guitar hall hammer hand handle harbor hat head
heart helmet hill hobby holiday honey hook horse hospital hotel house husband ice idea insect
island jacket jar jewel job judge juice jungle kettle key kitchen kite kitten knife ladder lady
lake lamp language laptop lawyer leaf leather leg lemon lesson letter library light lion list lock
log lunch machine magazine magnet manager map market mask meadow meal medal medicine member memory
message metal middle milk mill mind minister minute mirror mission model moment monkey month moon
morning mother motor mountain mouse mouth movie museum mushroom music musician nail name napkin
neck needle nest net newspaper night noise nose notebook number nurse nut ocean office officer oil
onion orange orchard oven owl owner package page paint painter palace pan pants paper parade
parent park parrot partner party passenger path peach peanut pen pencil pepper person phone photo
piano picnic picture pig pillow pilot pipe pirate pizza plan planet plant plate platform player
pocket poem poet police pond pony pool potato present president price prince princess printer
prison prize problem professor program project puppy purse puzzle queen question rabbit radio
raincoat recipe report restaurant ribbon rice ring river road robot rocket roof room rope rose
ruler sailor salad salt sand sandwich scarf school scientist scissors secret seed shadow shark
sheep shelf shell ship shirt shoe shop shoulder shovel signal silver singer sister skirt sky snake
snow soap sock sofa soldier song soup spider spoon spring stadium stamp station statue stick stone
store storm story stove stranger street student sugar suitcase summer supper surgeon sweater
swimmer table tailor tank teacher team telephone television temple tent theater thief thing ticket
tiger tin toe tomato tongue tool tooth tower town toy tractor train tree triangle truck trumpet
tunnel turkey turtle uncle uniform university valley van vegetable village violin visitor voice
wagon waiter wall wallet watch water whale wheel whistle wife window wing winter wolf woman
workshop world writer yard zebra zoo agency answer army author bargain bishop blossom bottom
breeze budget bullet bundle bureau butcher canal carpenter cellar champion channel charity chemist
choir citizen climate colony column comedy committee compass concert contract corridor council
county couple crystal culture damage danger deadline debate degree detail device diamond dinosaur
distance district document drama editor effort emperor enemy energy error escape estate example
expert failure fashion feature festival fiction figure flavor formula fortune fountain freedom
future galaxy gallery gentleman giant government guard guide habit harvest hero highway history
horizon hunter image income industry inspector interview inventor journal journey keyboard kingdom
knowledge label laborer landlord laundry lawn layer legend limit liquid magic mansion marble
matter mayor meeting melody merchant method mineral miracle mistake monster motion murder mystery
nation nature network novel object opinion option palm panel passport patient pattern payment
peasant performance permit pioneer pleasure poison policy politician portrait position powder
promise property protest province purpose quality quarter reason record region relative religion
remedy reply reporter rescue reward rhythm risk rival routine satellite schedule sculpture season
section selection sentence shelter sheriff silence solution source speaker spirit squirrel station
strategy struggle studio subject success surface surprise survey symbol system talent target
technique telescope texture theory thunder title tourist tournament trade tradition traffic
treasure treaty trial tribe trophy trouble umbrella universe vacation value vehicle version victim
victory vision volcano volunteer warning weapon weather wedding welcome witness wonder zone child
chef cheek chest cliff clue coast coin cream crew curve customs dish ditch doorbell drink drop egg
fever flame flight flock flood fog foam fuel gap glue grain guest hair haircut hallway harp heel
hen herd hint hole hunger ink iron jaw jelly joke juggler knee knot lace lamb lap leader lid lip
loaf luck lung maid mail mall maple match mast mayor melon mill mist mud mule nickname noon oak
oath page pair palm path pearl peel pie pile pin pit plane plum plug pole porch pot proof pupil
rail rain rake ramp rat ray rib rider river root rug sack sail sauce saw scale seat shade shed
sign skill skin sleeve slope smoke soil sound space speech spot square stage stair stairs star
steam stem step stick stool storm stream string suit sun sunset swan sword tail tale tape tear
team throat throne tie tide tongue torch track trail tray trip truth tube tune turn twin vase view
vine wave wax well wheat whip width wind wire wish wool wound wrist year youth
""".split()

# Nouns with no everyday plural, and those whose plural is not regular.
MASS = set(
    """
    bread butter cheese coffee copper cotton furniture gold grass honey ice juice knowledge
    laundry leather milk music oil rice salt sand sheep silver snow soap sugar traffic water
    weather energy freedom thunder magic police pants scissors nature history damage
    """.split()
)
IRREGULAR_PLURALS = {
    "child": "children", "fisherman": "fishermen", "foot": "feet", "gentleman": "gentlemen",
    "goose": "geese", "knife": "knives", "leaf": "leaves", "mouse": "mice", "person": "people",
    "scarf": "scarves", "shelf": "shelves", "thief": "thieves", "tooth": "teeth", "wife": "wives",
    "wolf": "wolves", "woman": "women", "fish": "fish", "potato": "potatoes", "tomato": "tomatoes",
    "hero": "heroes", "volcano": "volcanoes", "roof": "roofs", "photo": "photos",
}  # fmt: skip

FUNCTION = """
a about above after all along also an and another any anything are around as at away back be been
before being below between both but by did do does down during each either else enough even ever
every few for from had has have he her here him his how if in into is it its less me more most
much my near neither no nor not nothing now of off on one or other our out over own she since so
some something such than that the their them then there these they this those though through to
too toward under until up upon us very was we were what when where which while who why with within
without yet you your
""".split()

PEOPLE = """
artist aunt baker boss boy brother captain clerk coach cook cousin dancer daughter doctor driver
engineer farmer father fisherman friend girl grandfather grandmother guest husband judge lady
lawyer manager minister mother musician neighbor nurse officer owner painter passenger pilot
player poet president prince princess professor queen sailor scientist singer sister soldier
stranger student surgeon swimmer tailor teacher thief uncle visitor waiter wife woman writer
author butcher carpenter champion chemist citizen editor emperor expert gentleman guard guide
hunter inspector inventor landlord mayor merchant patient reporter sheriff speaker tourist
volunteer witness
""".split()

# Regular verbs (object verbs first), inflected by code.
VERBS = """
accept add admire adopt announce answer approve arrange ask attach attack attend avoid bake
balance blame boil borrow bounce brush call cancel capture carry cause change check choose clean
clear close collect compare complete consider contain continue cook copy correct count cover crash
cross damage decorate defend deliver deny describe deserve design destroy develop discover discuss
divide drag drop dry earn empty enjoy enter examine exchange expect explain explore express face
fasten fill finish fix fold follow force gather greet guard guess guide handle hate heat help hunt
identify ignore imagine improve include increase inform inspect install introduce invent invite
join judge kick kiss knock label launch lift like list load lock love manage mark measure mention
miss mix move name need notice obey observe offer open order organize owe own pack paint park pass
photograph pick place plan plant please polish pour practice praise prefer prepare present
preserve press print produce promise protect prove pull punish push question raise reach receive
recognize record reduce refuse release remember remove repair repeat replace rescue return roll
ruin save scratch search select serve share shout sign smell solve spoil stop store study suggest
supply support surprise taste test thank tie touch trade train trust try unlock use value visit
want warn wash watch wave welcome wipe wrap
""".split()

# base, third person, past, -ing
IRREGULAR_VERBS = """
bring brings brought bringing|build builds built building
catch catches caught catching|choose chooses chose choosing
cut cuts cut cutting|draw draws drew drawing
drink drinks drank drinking|drive drives drove driving
eat eats ate eating|feed feeds fed feeding
find finds found finding|forget forgets forgot forgetting
get gets got getting|give gives gave giving
hide hides hid hiding|hold holds held holding
keep keeps kept keeping|leave leaves left leaving
lend lends lent lending|lose loses lost losing
make makes made making|pay pays paid paying
read reads read reading|ride rides rode riding
see sees saw seeing|sell sells sold selling
send sends sent sending|shake shakes shook shaking
show shows showed showing|sing sings sang singing
steal steals stole stealing|take takes took taking
teach teaches taught teaching|throw throws threw throwing
understand understands understood understanding|win wins won winning
write writes wrote writing
"""

# base, third person, past, -ing of verbs that take no object
INTRANSITIVE = """
arrive arrives arrived arriving|begin begins began beginning
breathe breathes breathed breathing|come comes came coming
cough coughs coughed coughing|cry cries cried crying
dance dances danced dancing|disappear disappears disappeared disappearing
fall falls fell falling|fight fights fought fighting
float floats floated floating|fly flies flew flying
go goes went going|grow grows grew growing
hurry hurries hurried hurrying|jump jumps jumped jumping
laugh laughs laughed laughing|listen listens listened listening
live lives lived living|relax relaxes relaxed relaxing
rest rests rested resting|run runs ran running
shine shines shone shining|sit sits sat sitting
sleep sleeps slept sleeping|smile smiles smiled smiling
speak speaks spoke speaking|stand stands stood standing
stay stays stayed staying|swim swims swam swimming
talk talks talked talking|travel travels traveled traveling
wait waits waited waiting|wake wakes woke waking
walk walks walked walking|whisper whispers whispered whispering
work works worked working|worry worries worried worrying
wander wanders wandered wandering|vanish vanishes vanished vanishing
"""

ADJECTIVES = """
active angry ancient anxious average bitter black blue bold brave brief bright broken brown busy
calm careful careless central cheap cheerful clean clear clever cold colorful comfortable common
complete cool correct crazy cruel curious curly damp dangerous dark dear deep delicate delicious
different difficult direct dirty distant dry dull dusty eager early eastern easy elegant empty
enormous entire equal excellent exciting expensive extra faithful familiar famous fancy fast fat
favorite final fine firm flat foreign formal fragile free fresh friendly frozen funny gentle glad
golden good grand grateful gray great green handsome happy hard heavy helpful hidden high hollow
honest hot huge humble hungry important impossible innocent jealous joyful jolly kind large late
lazy light little local lonely long loose loud lovely lucky mad magnificent massive medium merry
mighty modern modest muddy narrow natural nearby neat nervous new nice noisy normal northern
obvious odd official old open orange ordinary original patient peaceful perfect pink plain
pleasant polite poor popular possible powerful precious pretty private proper proud public pure
purple quick quiet rapid rare ready real recent red regular rich ripe rough round royal rude rusty
sad safe salty secret separate serious shallow sharp shiny short shy silent silly simple single
sleepy slim slippery slow small smart smooth soft solid sour southern special square stiff strange
strict strong stupid sudden sunny sweet tall tasty tender terrible thick thin thirsty tidy tight
tiny tired tough tropical ugly unusual upset urgent useful usual valuable various warm wealthy
western wet white wicked wide wild willing wise wonderful wooden yellow young
""".split()

ADVERBS = """
again almost already always anyway badly barely behind bravely calmly carefully certainly clearly
closely completely constantly correctly deeply directly easily eagerly early exactly finally
gently gladly happily hardly honestly immediately indeed just kindly lately later loudly mainly
maybe mostly nearly never nicely normally often once only openly patiently perfectly perhaps
politely possibly probably properly quickly quietly quite rarely really recently regularly sadly
safely seldom seriously sharply shortly silently simply slowly smoothly softly sometimes soon
still strongly suddenly surely terribly together tonight twice usually warmly wisely yesterday
""".split()

FIRST_NAMES = """
Adam Agnes Albert Alice Amanda Andrew Angela Anna Anthony Arthur Barbara Benjamin Bernard Betty
Brandon Brian Carl Caroline Charles Charlotte Christina Clara Daniel David Deborah Dennis Diana
Donald Dorothy Douglas Edward Eleanor Elizabeth Emily Emma Eric Ernest Ethan Eva Florence Frances
Francis Frank Frederick George Gloria Gordon Grace Hannah Harold Harriet Harry Heather Helen Henry
Howard Isabel Jack Jacob James Jane Janet Jason Jennifer Jessica Joan Jonathan Joseph Joshua
Judith Julia Karen Katherine Keith Kenneth Kevin Larry Laura Leonard Lewis Linda Louise Lucy
Margaret Maria Martha Martin Mary Matthew Melissa Michael Monica Nancy Natalie Nicholas Norman
Oliver Olivia Oscar Pamela Patrick Paul Peter Philip Rachel Ralph Raymond Rebecca Richard Robert
Roger Rose Samuel Sandra Sarah Simon Sophia Stanley Steven Susan Sylvia Teresa Thomas Timothy
Valerie Vanessa Victor Victoria Vincent Walter Wendy William
""".split()

LAST_NAMES = """
Adams Alexander Anderson Armstrong Arnold Bailey Baker Barker Barnes Bennett Black Bradley Brown
Butler Campbell Carpenter Carter Chapman Clark Coleman Collins Cooper Crawford Davidson Davis
Dixon Edwards Elliott Evans Fisher Fletcher Foster Fox Gardner Gibson Gordon Graham Grant Hamilton
Harper Harris Harrison Hart Henderson Hill Holmes Hudson Hughes Hunter Jackson Jenkins Johnson
Jones Jordan Kennedy King Knight Lambert Lawrence Marshall Mason Miller Mitchell Morgan Morris
Murphy Nelson Newman Nichols Norris Owens Palmer Parker Perkins Peters Phillips Porter Powell
Reynolds Richardson Roberts Robinson Rogers Russell Sanders Shaw Simpson Spencer Stevens Sullivan
Taylor Thompson Tucker Turner Wagner Walker Wallace Warren Watson Weaver Webster Wilson Wood Young
""".split()

PLACES = """
Africa Alaska Amsterdam Arizona Asia Athens Atlanta Australia Austria Baltimore Bangkok Barcelona
Belfast Belgium Berlin Birmingham Boston Brazil Bristol Brussels Budapest Cairo California
Cambridge Canada Cardiff Charleston Chicago China Cleveland Colorado Columbus Copenhagen Cuba
Dallas Denmark Denver Detroit Dublin Edinburgh Egypt England Europe Finland Florence Florida
France Geneva Georgia Germany Glasgow Greece Hamburg Havana Hawaii Helsinki Holland Houston
Hungary Iceland India Indiana Iowa Ireland Israel Istanbul Italy Jamaica Japan Jerusalem Kansas
Kentucky Kenya Lisbon Liverpool London Madrid Manchester Melbourne Memphis Mexico Miami Michigan
Milan Minnesota Montana Montreal Morocco Moscow Munich Naples Nashville Nebraska Nevada Nigeria
Norway Ohio Oregon Oslo Ottawa Oxford Paris Pennsylvania Peru Philadelphia Phoenix Poland Portland
Portugal Prague Richmond Rome Russia Scotland Seattle Shanghai Singapore Spain Stockholm Sweden
Switzerland Sydney Tennessee Texas Tokyo Toronto Turkey Utah Vancouver Venice Vermont Vienna
Virginia Wales Warsaw Washington Zurich
""".split()

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
SEASONS = "spring summer autumn winter".split()
ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
    "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
).split()
UNITS = """
meters kilometers miles inches pounds kilos liters dollars cents hours days weeks years
""".split()
RELATIONS = "behind near under above beside across around inside outside beyond".split()
EXCLAMATIONS = (
    "Well|Of course|No problem|Good morning|Good evening|Thank you|Excuse me|Never mind|All right|"
    "Yes|No|Hello|Goodbye|Sorry|Great|Wait|Listen|Careful|Really|Exactly|Congratulations|Hurry up|"
    "Not yet|Of course not|See you soon|See you tomorrow|I think so|Maybe later|Have a nice day"
).split("|")
