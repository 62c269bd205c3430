"""Spanish word lists for the grammar in `text.py`. Plain data: no code beyond splitting."""

MASCULINE = """
abogado abrigo abuelo aceite actor aeropuerto agricultor ajedrez alcalde alemán almuerzo alumno
amigo anillo animal apartamento arquitecto arroz artista asiento asunto atleta autobús avión
ayuntamiento azúcar bailarín balcón banco baño barco barrio bastón batallón billete bolígrafo
bolso bosque botón brazo caballo cajón calendario camarero camello camino camión campamento campo
canal cantante capitán capítulo carnicero cartero castillo centro cerdo cielo cine cirujano
ciudadano clavel cliente coche cocinero colegio collar color comedor concierto conductor conejo
consejo contrato corazón cordero correo cuaderno cuadro cuarto cuchillo cuello cuento cuerpo
cumpleaños cuñado dedo delfín dentista deporte desayuno desierto detective diario dibujo
diccionario diente dinero director documento dolor domicilio dueño edificio ejemplo ejercicio
elefante embajador empleado enemigo enfermero equipo error escenario escritor escritorio espejo
estudiante examen extranjero fantasma farmacéutico favor festival fontanero fotógrafo fuego futuro
gallo ganado garaje gato general gigante gobierno grupo guante guardia guerrero helado hermano
hijo hombre horno hospital hotel hueso huevo idioma impuesto incendio ingeniero invierno invitado
jabón jardín jardinero jefe jugador juguete ladrillo ladrón lago lápiz lector león libro limón
lobo lugar maestro mantel mapa mar marido marinero martillo médico melón mensaje mercado mes metal
minuto momento mono mueble mundo muro museo músico negocio nieto niño nombre novio número océano
oficial ojo ordenador oso pájaro palacio panadero pantalón pañuelo papel paquete paraguas parque
partido pasajero pasillo pastel pato payaso peatón peligro pelo perfume periódico periodista perro
pescado pianista pie piloto pintor pirata piso plan planeta plato poema poeta policía político
pollo premio presidente primo príncipe problema profesor programa proyecto pueblo puente puerto
queso ratón regalo reloj remedio reportero resultado retrato rey rincón río robot sábado saco
salón secreto sello semáforo sendero silencio sobre sobrino soldado sombrero sonido sótano sueño
suelo supermercado taller tambor taxi techo teléfono tema templo tenedor tesoro testigo tiempo
tigre tomate tornillo toro trabajo traje tren triángulo túnel turista vaso vecino vendedor
ventilador verano vestido viaje viajero viento violín volcán zapatero zapato
""".split()

FEMININE = """
abeja abogada abuela academia actriz aduana aguja alegría alfombra almohada alumna amiga amistad
araña arena aventura ayuda bailarina ballena bandeja bandera barba batalla batería bebida
biblioteca bicicleta boca bodega bolsa bombilla bota botella broma bufanda caja cama cámara
camarera camisa campana canción cara cárcel carne carpeta carretera carta cartera casa catedral
cebolla cena cereza chaqueta cima ciudad clase cocina cocinera colina comida compañía computadora
condición conferencia corbata cortina costumbre cuchara cuenta cuerda cueva cultura dama danza
decisión directora discusión distancia ducha duda empresa enfermedad enfermera ensalada entrada
entrevista escalera escoba escritora escuela espalda esperanza esposa esquina estación estatua
estrella estufa excursión explicación fábrica falda familia farmacia fecha felicidad fiesta flauta
flor foto fotografía frase frente fresa frontera fruta fuente galleta gallina garganta gasolina
gente gota granja guerra guitarra habitación hermana herramienta hierba hija historia hoja hora
iglesia imagen información ingeniera isla jirafa joya jugadora lámpara lana langosta lección leche
lechuga lengua letra ley leyenda librería linterna llave lluvia lucha luna luz madera madre
maestra maleta manta mantequilla manzana máquina mariposa medicina médica memoria mentira mesa
mesita mochila moneda montaña moto mujer muralla música nación naranja nariz naturaleza nevera
nieta niña nieve noche noticia novela novia nube oficina oficina olla oportunidad orilla oveja
página palabra paloma panadería pantalla papa pared pareja parte patata película pelota península
pera percha persona piedra piel pierna pintora piña piscina pista planta plata playa plaza pluma
población pregunta prima princesa prisa profesora promesa propina prueba puerta pulsera rama rana
receta red regla reina respuesta reunión revista rodilla ropa rosa rueda sabana sala salsa sandía
sangre selva semana semilla señal señora serpiente servilleta silla sobrina solución sombra
sonrisa sopa sorpresa suerte tarea tarjeta tarta taza televisión temporada tía tienda tierra
tijera tormenta torre tortuga tradición uva vaca vacación vecina vela ventana verdad vida visita
voz zanahoria zapatilla
""".split()

FUNCTION = """
a al algo alguien algún algunas algunos ante antes aquel aquella así aún aunque bajo cada casi
como con contra cual cuando de del desde donde dos durante el él ella ellas ellos en entre era
eres es esa ese eso esta estaba estas este esto estos está están estamos estoy fue ha había han
hasta hay he la las le les lo los más me mi mis menos mientras mucho mucha muy nada ni nos
nosotros nuestra nuestro nuestras nuestros o otra otro para pero poco por porque prefiero prefiere
pues que quien se sea según ser si sin sino sobre somos son soy su sus también tan tanto te tener
tengo tiene tienes tienen toda todo todas todos tres tu tus un una unas uno unos usted ustedes va
van voy y ya yo dijo dice hace hizo puedo pueden quiero quieren
""".split()

PEOPLE = """
abogado abuelo agricultor alcalde alumno amigo arquitecto artista bailarín camarero cantante
capitán carnicero cartero cirujano cocinero conductor dentista director dueño embajador empleado
enfermero escritor estudiante fotógrafo hermano hijo hombre ingeniero invitado jardinero jefe
jugador ladrón lector maestro marido marinero médico músico nieto niño novio oficial panadero
pasajero payaso periodista pianista piloto pintor poeta policía presidente primo príncipe profesor
rey sobrino soldado testigo turista vecino vendedor viajero zapatero abogada abuela actriz alumna
amiga bailarina camarera cocinera directora enfermera escritora esposa hermana hija ingeniera
jugadora madre maestra médica mujer nieta niña novia pintora prima princesa profesora reina señora
sobrina tía vecina
""".split()

# Regular verbs that take an object, conjugated by code.
AR_VERBS = """
abandonar aceptar acompañar admirar alquilar amar apagar arreglar ayudar bajar besar borrar buscar
calentar cambiar cancelar cantar celebrar cerrar cocinar colocar comprar comparar completar
conservar consultar contestar copiar cortar criticar cuidar cultivar decorar dejar descansar
descargar desear dibujar disfrutar doblar empujar encontrar enseñar entregar enviar escuchar
esperar estudiar evitar examinar explicar explorar fabricar felicitar firmar fotografiar ganar
gastar golpear gritar guardar imaginar inventar invitar juntar lavar levantar limpiar llamar
llenar llevar mandar manejar matar mejorar mencionar mezclar mirar montar mostrar necesitar
observar ocultar odiar olvidar ordenar organizar pagar pasar pelar peinar perdonar pintar planchar
plantar practicar preguntar preparar presentar prestar probar publicar quitar recomendar recordar
regalar regresar renovar reparar repasar reservar respetar revisar robar romper saltar saludar
separar terminar tirar tocar tomar trasladar usar vigilar visitar
""".split()
ER_IR_VERBS = """
abrir aprender beber comer comprender correr cubrir decidir descubrir describir discutir dividir
escribir esconder interrumpir leer meter permitir prohibir prometer recibir repartir responder
subir sufrir temer unir vender vivir
""".split()
# Verbs whose stem or spelling changes: left out of code-made conjugation.
SKIP_VERBS = set(
    "cerrar calentar encontrar mostrar probar recomendar recordar renovar romper cubrir leer "
    "fotografiar enviar descubrir abrir prohibir gritar saltar regresar descansar".split()
)

PHRASES_MOVE = """
llegó a|salió de|viajó a|viaja a|vive en|vivía en|trabaja en|trabajaba en|nació en|quiere ir a
va a|fue a|volvió a|regresó de|se fue a|se quedó en|se perdió en|estudia en|viene de
"""

ADJECTIVES = """
abierto absurdo aburrido activo alto amable amargo amarillo ancho antiguo atento azul bajo barato
blanco blando bonito brillante bueno caliente cansado capaz caro cercano cierto claro cobarde
cómodo complicado contento corto cruel curioso débil delgado delicado derecho desnudo diferente
difícil distinto divertido duro elegante enfermo enorme entero estrecho excelente extraño fácil
falso famoso feliz feo fiel final fino firme frágil fresco frío fuerte furioso gordo grande gris
grueso guapo hermoso honesto horrible humilde igual importante imposible inocente inteligente
interesante izquierdo joven largo lento leve libre ligero limpio listo llano lleno local loco
lujoso maduro magnífico malo maravilloso mayor mejor menor moderno mojado moreno natural necesario
negro nervioso normal noble nuevo oscuro pálido peligroso pequeño perezoso perfecto pesado picante
pobre popular posible precioso preocupado profundo propio público puntual puro rápido raro recto
redondo reciente rico rojo roto rubio ruidoso sabio sabroso salado sano santo seco seguro sencillo
serio silencioso simpático simple sincero solo sonriente suave sucio tímido tonto tranquilo triste
útil vacío valiente verde viejo violento vivo
""".split()

ADVERBS = """
ahora ahí allí anoche antes apenas aquí ayer bastante bien casi cerca claramente completamente
constantemente demasiado dentro deprisa despacio después directamente enseguida entonces
especialmente exactamente fácilmente finalmente fuera hoy igualmente inmediatamente jamás juntos
lejos lentamente luego mal mañana mientras mucho normalmente nunca perfectamente poco
probablemente pronto quizás rápidamente realmente recientemente seguramente siempre simplemente
sinceramente solamente suavemente también tampoco tarde temprano todavía tranquilamente
""".split()

FIRST_NAMES = """
Adriana Agustín Alberto Alejandra Alejandro Alfonso Alicia Alonso Álvaro Amalia Ana Andrea Andrés
Ángela Antonio Beatriz Bruno Camila Carla Carlos Carmen Carolina Catalina Cecilia Clara Claudia
Cristina Daniel Daniela David Diana Diego Dolores Eduardo Elena Emilio Enrique Ernesto Esteban
Eugenia Felipe Fernanda Fernando Francisca Francisco Gabriel Gabriela Gloria Gonzalo Guillermo
Gustavo Héctor Ignacio Inés Irene Isabel Jaime Javier Jorge José Josefina Juan Julia Julián Laura
Leonor Leticia Lorena Lorenzo Lucía Luis Luisa Manuel Marcela Marcos Margarita María Mariana Mario
Marta Martín Mateo Mercedes Miguel Mónica Natalia Nicolás Nuria Óscar Pablo Patricia Paula Pedro
Pilar Rafael Ramón Raquel Ricardo Roberto Rocío Rodrigo Rosa Rubén Salvador Santiago Sara
Sebastián Sergio Silvia Sofía Susana Teresa Tomás Valentina Verónica Vicente Víctor Violeta
""".split()

LAST_NAMES = """
Acosta Aguilar Alonso Álvarez Arias Benítez Blanco Cabrera Calderón Campos Cano Carrasco Castillo
Castro Contreras Cortés Cruz Delgado Díaz Domínguez Escobar Espinosa Fernández Flores Fuentes
Gallego García Garrido Gil Gómez González Guerrero Gutiérrez Hernández Herrera Ibáñez Iglesias
Jiménez León López Lozano Marín Márquez Martínez Medina Méndez Mendoza Molina Montero Mora Morales
Moreno Moya Muñoz Navarro Núñez Ortega Ortiz Pascual Peña Pérez Prieto Ramírez Ramos Reyes Ríos
Rivera Rodríguez Romero Rubio Ruiz Salazar Sánchez Santana Santos Serrano Silva Soto Suárez Torres
Valencia Vargas Vega Velasco Vidal
""".split()

PLACES = """
África Alemania Alicante Andalucía Argentina Asturias Australia Austria Badajoz Barcelona Bélgica
Bilbao Bogotá Bolivia Brasil Buenos_Aires Burgos Cádiz California Canadá Caracas Cartagena Chile
China Colombia Córdoba Costa_Rica Cuba Dinamarca Ecuador Egipto Escocia España Europa Finlandia
Florencia Francia Galicia Ginebra Granada Grecia Guadalajara Guatemala Holanda Honduras Hungría
India Inglaterra Irlanda Italia Japón La_Habana La_Paz León Lima Lisboa Londres Lugo Madrid Málaga
Marruecos México Miami Milán Montevideo Moscú Murcia Nicaragua Noruega Nueva_York Oviedo Panamá
Paraguay París Perú Polonia Portugal Praga Quito Roma Rosario Rusia Salamanca San_Juan Santander
Santiago Segovia Sevilla Suecia Suiza Tenerife Toledo Turquía Uruguay Valencia Valladolid Venecia
Venezuela Viena Zaragoza
""".split()

DAYS = "lunes martes miércoles jueves viernes sábado domingo".split()
MONTHS = """
enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre
""".split()
UNITS = "metros kilómetros kilos litros euros pesos minutos días meses años".split()
RELATIONS = (
    "detrás de|cerca de|debajo de|encima de|al lado de|alrededor de|dentro de|fuera de".split("|")
)
EXCLAMATIONS = (
    "Claro|Por supuesto|Buenos días|Buenas tardes|Buenas noches|Muchas gracias|Lo siento|Perdón|"
    "Sí|No|Hola|Adiós|De nada|De acuerdo|Hasta luego|Hasta mañana|Feliz cumpleaños|Qué sorpresa|"
    "Qué lástima|Cuidado|Un momento|Creo que sí|Tal vez mañana|Todavía no|No importa|Ven aquí"
).split("|")
