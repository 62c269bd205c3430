"""Sentences written for the held-out clips, about half with a word that the demo's grammar lacks.

Plain data. Numbers are in words, for the checkpoint writes no digits.
"""

ENGLISH = """
The bakery sells fresh bread and lemon cake.
We planted pumpkins beside the old barn.
My grandmother keeps her diary in a locked drawer.
The lawyer refused to answer the last question.
Please open the windows before you paint the ceiling.
The ferry leaves the harbor at a quarter past seven.
A brown bear was fishing near the waterfall.
The nurse measured my temperature twice.
Our neighbor plays the trumpet every evening.
The judge listened to the witness in silence.
She found a silver bracelet under the sofa.
The children built a snowman behind the school.
Why is the dog barking at the mailman?
The firemen rescued a kitten from the roof.
He repaired the engine with a small hammer.
My uncle collects stamps from foreign countries.
The river was frozen for eleven weeks.
The teacher closed the library at noon.
There is a strange noise in the basement.
They crossed the desert on three camels.
The queen invited the ambassador to dinner.
A thick fog covered the valley in the morning.
The tailor finished the wedding dress on Friday.
I forgot my umbrella on the train.
The police discovered the money in a suitcase.
Can you bring me a spoon for the honey?
The garden was full of butterflies last summer.
His brother works in a chocolate factory.
The captain saw a lighthouse in the distance.
We need forty wooden chairs for the concert.
The pilot landed the plane during the storm.
My cousin wants to become a dentist.
The museum bought an ancient golden mask.
Everybody laughed at the funny puppets.
The farmer sold his sheep at the market.
Do you know the answer to this puzzle?
The baby was sleeping in the quiet bedroom.
A huge truck blocked the narrow bridge.
The scientist described a new planet.
The waiter dropped a tray of glasses.
My sister writes a poem every weekend.
The players were tired after the game.
Where did you buy those leather boots?
The carpenter measured the wooden door.
A mouse was hiding behind the piano.
The mayor opened the new swimming pool.
They drank hot chocolate beside the fire.
The sailors waited for a warm wind.
The prisoner escaped through a tunnel.
Her jacket was wet and very muddy.
The astronaut returned to the earth in March.
An old violin was hanging on the wall.
The photographer lost his camera in the jungle.
We watched the parade from the balcony.
The cook added garlic and pepper to the soup.
My father reads the newspaper in the kitchen.
The volcano destroyed two small villages.
Nobody noticed the thief in the crowd.
The poor man slept on a bench in the park.
The passengers were angry because the bus was late.
A gentle breeze moved the curtain.
The gardener cut the grass with a sharp machine.
The princess wore a beautiful green scarf.
Is the pharmacy still open tonight?
The elephant carried a heavy basket.
The electrician fixed the lamp in the hallway.
It rained all day, so we stayed in the tent.
The manager promised to call me on Tuesday.
A spider was climbing up the bathroom wall.
The potatoes are in the bottom drawer.
The student borrowed nine books about history.
My mother cleaned the oven with lemon juice.
The orchestra will play in Vienna tomorrow.
The hunter followed the wolf through the snow.
Who left the bicycle in front of the garage?
The wizard turned the prince into a frog.
There were sixteen candles on the cake.
The plumber arrived at half past eight.
The cat jumped over the fence and disappeared.
The mechanic cleaned his hands with an oily cloth.
""".strip().split("\n")

SPANISH = """
La panadería vende pan fresco y tarta de limón.
El abogado no contestó la última pregunta.
Mi abuela guarda su diario en un cajón cerrado.
Por favor, abre la ventana antes de pintar la pared.
El barco sale del puerto a las siete y cuarto.
La enfermera me tomó la temperatura dos veces.
Nuestro vecino toca la trompeta cada noche.
La jueza escuchó al testigo en silencio.
Encontró un anillo de plata debajo del sofá.
Los niños jugaban detrás de la escuela.
Los bomberos rescataron a un gato del tejado.
Reparó el motor con un martillo pequeño.
Mi tío colecciona monedas de muchos países.
El río estuvo helado durante once semanas.
La maestra cerró la biblioteca a mediodía.
Hay un ruido extraño en el sótano.
Cruzaron el desierto con tres camellos.
La reina invitó al embajador a cenar.
La niebla cubría el valle por la mañana.
El sastre terminó el vestido de novia el viernes.
Olvidé el paraguas en el tren.
La policía encontró el dinero en una maleta.
¿Me traes una cuchara para la miel?
El jardín estaba lleno de mariposas.
Su hermano trabaja en una fábrica de zapatos.
El capitán vio un faro a lo lejos.
Necesitamos cuarenta sillas para el concierto.
Mi primo quiere ser dentista.
El museo compró una máscara de oro.
Todos se rieron de los payasos.
El granjero vendió sus ovejas en el mercado.
El bebé dormía en una habitación tranquila.
Un camión enorme bloqueó el puente.
La científica descubrió un planeta nuevo.
El camarero rompió cinco vasos.
Mi hermana escribe un poema cada semana.
Los jugadores estaban cansados después del partido.
¿Dónde compraste esas botas de cuero?
Un ratón se escondía detrás del piano.
La alcaldesa abrió la nueva piscina.
Bebieron chocolate caliente junto al fuego.
El preso escapó por un túnel.
La chaqueta estaba mojada y muy sucia.
La astronauta volvió a la tierra en marzo.
Un violín viejo colgaba de la pared.
El fotógrafo perdió la cámara en la selva.
La cocinera echó ajo y pimienta a la sopa.
Mi padre lee el periódico en la cocina.
El volcán destruyó dos pueblos pequeños.
Nadie vio al ladrón entre la gente.
El jardinero cortó la hierba el domingo.
La princesa llevaba una bufanda verde.
¿La farmacia sigue abierta esta noche?
El elefante llevaba una cesta pesada.
El electricista arregló la lámpara del pasillo.
Llovió todo el día y no salimos de casa.
Una araña subía por la pared del baño.
Las patatas están en el cajón de abajo.
El estudiante leyó nueve libros de historia.
Mi madre limpió el horno con zumo de limón.
La orquesta tocará mañana en Granada.
El cazador siguió al lobo por la nieve.
¿Quién dejó la bicicleta delante del garaje?
El mago convirtió al príncipe en una rana.
Había dieciséis velas en la tarta.
El fontanero llegó a las ocho y media.
El gato saltó la valla y desapareció.
El ciclista subió la montaña bajo el sol.
La cirujana operó la rodilla del portero.
El notario leyó la carta en voz alta.
La bailarina perdió una zapatilla en el teatro.
El arquitecto dibujó una torre muy alta.
Los pescadores regresaron antes de la tormenta.
La vaca comía flores en el prado.
El dueño del hotel nos dio una llave dorada.
Mi sobrina quiere un caballo blanco.
La lluvia golpeaba el techo de la cabaña.
El veterinario curó la pata del perro.
El carpintero hizo una mesa de roble.
Compramos aceitunas, queso y una sandía.
""".strip().split("\n")
