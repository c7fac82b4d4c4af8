\ Words that are written in Forth. A line before a definition names its chapter; the comments give
\ its effect and what it does.

\ chapter: arithmetic
: SQUARED ( n -- n*n ) \ A number times itself.
  DUP * ;
: CUBED ( n -- n*n*n ) \ The third power of a number.
  DUP DUP * * ;
: 4TH-POWER ( n -- n^4 ) \ The fourth power of a number.
  SQUARED SQUARED ;
: 3* ( n -- 3n ) \ Three times a number.
  3 * ;
: 4* ( n -- 4n ) \ Four times a number.
  2* 2* ;
: 5* ( n -- 5n ) \ Five times a number.
  5 * ;
: 10* ( n -- 10n ) \ Ten times a number.
  10 * ;
: 10/ ( n -- n/10 ) \ A tenth of a number, rounded down.
  10 / ;
: 100* ( n -- 100n ) \ A hundred times a number.
  100 * ;
: 3/ ( n -- n/3 ) \ A third of a number, rounded down.
  3 / ;
: 4/ ( n -- n/4 ) \ A quarter of a number, rounded down.
  4 / ;
: AVERAGE ( a b -- mean ) \ The mean of two numbers, rounded down.
  + 2/ ;
: DISTANCE ( a b -- size ) \ How far two numbers are from each other.
  - ABS ;
: CLAMP ( n low high -- n' ) \ The number of low to high that is nearest to n.
  ROT MIN MAX ;
: PERCENT ( n p -- n*p/100 ) \ p percent of a number, rounded down.
  100 */ ;
: CEIL/ ( a b -- quotient ) \ Divide and round up.
  SWAP NEGATE SWAP / NEGATE ;
: ROUND/ ( a b -- quotient ) \ Divide and round to the nearest; half goes up.
  DUP 2/ ROT + SWAP / ;
: UNDER+ ( a b c -- a+c b ) \ Add the top number to the third.
  ROT + SWAP ;
: SUM3 ( a b c -- sum ) \ Add three numbers.
  + + ;
: PRODUCT3 ( a b c -- product ) \ Multiply three numbers.
  * * ;
: MAX3 ( a b c -- largest ) \ The largest of three numbers.
  MAX MAX ;
: MIN3 ( a b c -- smallest ) \ The smallest of three numbers.
  MIN MIN ;
: MEDIAN3 ( a b c -- middle ) \ The middle one of three numbers.
  3DUP MAX3 >R 3DUP MIN3 >R + + 2R> + - ;
: MINMAX ( a b -- smaller larger ) \ Two numbers in order.
  2DUP > IF SWAP THEN ;
: SQ+ ( a b -- a*a+b*b ) \ The sum of two squares.
  SQUARED SWAP SQUARED + ;
: SQ- ( a b -- a*a-b*b ) \ The difference of two squares.
  SQUARED SWAP SQUARED SWAP - ;
: HYPOT ( a b -- length ) \ The longest side of a right triangle, rounded down.
  SQ+ ISQRT ;
: TRIANGULAR ( n -- sum ) \ 1 + 2 + ... + n.
  DUP 1+ * 2/ ;
: SUM-SQUARES ( n -- sum ) \ 1 + 4 + 9 + ... + n*n.
  0 SWAP 1+ 1 ?DO I SQUARED + LOOP ;
: FACTORIAL ( n -- n! ) \ 1 * 2 * ... * n.
  1 SWAP 1+ 1 ?DO I * LOOP ;
: FIBONACCI ( n -- f ) \ The n-th Fibonacci number; 0 and 1 are the first.
  0 1 ROT 0 ?DO TUCK + LOOP DROP ;
: LUCAS ( n -- l ) \ The n-th Lucas number; 2 and 1 are the first.
  2 1 ROT 0 ?DO TUCK + LOOP DROP ;
: CHOOSE ( n k -- count ) \ How many ways there are to take k of n things.
  2DUP < IF 2DROP 0 EXIT THEN
  1 SWAP 0 ?DO OVER I - * I 1+ / LOOP NIP ;
: PERMUTATIONS ( n k -- count ) \ How many orders there are of k of n things.
  2DUP < IF 2DROP 0 EXIT THEN
  1 SWAP 0 ?DO OVER I - * LOOP NIP ;
: CATALAN ( n -- c ) \ The n-th Catalan number.
  DUP 2* OVER CHOOSE SWAP 1+ / ;
: PENTAGONAL ( n -- p ) \ The n-th pentagonal number.
  DUP 3* 1- * 2/ ;
: HEXAGONAL ( n -- h ) \ The n-th hexagonal number.
  DUP 2* 1- * ;
: ILOG2 ( n -- k ) \ The largest k with 2^k <= n; n must be positive.
  BIT-LENGTH 1- ;
: ILOG10 ( n -- k ) \ One less than the digits of a positive number.
  0 BEGIN SWAP 10 / DUP WHILE SWAP 1+ REPEAT DROP ;
: NUM-DIGITS ( n -- count ) \ How many digits a number has, without its sign.
  ABS DUP 0= IF DROP 1 ELSE ILOG10 1+ THEN ;
: DIGIT-SUM ( n -- sum ) \ The sum of the digits of a number.
  ABS 0 BEGIN OVER WHILE SWAP 10 /MOD SWAP ROT + REPEAT NIP ;
: DIGIT-PRODUCT ( n -- product ) \ The product of the digits of a number; 0 gives 1.
  ABS 1 BEGIN OVER WHILE SWAP 10 /MOD SWAP ROT * REPEAT NIP ;
: REVERSE-DIGITS ( n -- n' ) \ The digits of a number from the last to the first.
  ABS 0 BEGIN OVER WHILE 10 * SWAP 10 /MOD SWAP ROT + REPEAT NIP ;
: DIGIT-ROOT ( n -- digit ) \ The sum of the digits, again and again, down to one digit.
  BEGIN DIGIT-SUM DUP 9 > WHILE REPEAT ;
: DIGIT-AT ( n place -- digit ) \ A digit of a number; place 0 is the last.
  0 ?DO 10 / LOOP 10 MOD ;
: LAST-DIGIT ( n -- digit ) \ The last digit of a number.
  ABS 10 MOD ;
: FIRST-DIGIT ( n -- digit ) \ The first digit of a number.
  ABS BEGIN DUP 9 > WHILE 10 / REPEAT ;
: NUM-DIVISORS ( n -- count ) \ How many numbers divide a positive number.
  0 OVER 1+ 1 ?DO OVER I MOD 0= IF 1+ THEN LOOP NIP ;
: SUM-DIVISORS ( n -- sum ) \ The sum of all numbers that divide a positive number.
  0 OVER 1+ 1 ?DO OVER I MOD 0= IF I + THEN LOOP NIP ;
: SMALLEST-FACTOR ( n -- p ) \ The smallest divisor above 1 of a number above 1.
  DUP 2 BEGIN 2DUP SQUARED >= WHILE 2DUP MOD 0= IF NIP NIP EXIT THEN 1+ REPEAT 2DROP ;
: TOTIENT ( n -- count ) \ How many of 1 to n share no divisor with n.
  0 OVER 1+ 1 ?DO OVER I GCD 1 = IF 1+ THEN LOOP NIP ;
: MODPOW ( a n m -- r ) \ The rest of a^n divided by m.
  >R 1 -ROT BEGIN DUP WHILE
    DUP 1 AND IF >R TUCK * R> SWAP R@ MOD -ROT THEN
    2/ SWAP SQUARED R@ MOD SWAP
  REPEAT 2DROP R> MOD ;
: COLLATZ ( n -- n' ) \ Half of an even number; 3n + 1 of an odd one.
  DUP 1 AND IF 3* 1+ ELSE 2/ THEN ;
: COLLATZ-STEPS ( n -- count ) \ How often COLLATZ is done until 1.
  0 BEGIN OVER 1 > WHILE SWAP COLLATZ SWAP 1+ REPEAT NIP ;
: WRAP ( n low high -- n' ) \ n moved by whole spans into low <= n' < high.
  OVER - >R TUCK - R> MOD + ;
: LERP ( a b n d -- x ) \ The number n/d of the way from a to b.
  >R >R OVER - R> R> */ + ;

\ chapter: comparison
: POSITIVE? ( n -- flag ) \ Whether a number is above 0.
  0> ;
: NEGATIVE? ( n -- flag ) \ Whether a number is below 0.
  0< ;
: ZERO? ( n -- flag ) \ Whether a number is 0.
  0= ;
: MULTIPLE? ( n m -- flag ) \ Whether n is a multiple of m, which is not 0.
  MOD 0= ;
: SAME-SIGN? ( a b -- flag ) \ Whether two numbers have the same sign.
  SGN SWAP SGN = ;
: COPRIME? ( a b -- flag ) \ Whether two numbers share no divisor above 1.
  GCD 1 = ;
: PRIME? ( n -- flag ) \ Whether a number is a prime.
  DUP 2 < IF DROP FALSE EXIT THEN DUP SMALLEST-FACTOR = ;
: SQUARE? ( n -- flag ) \ Whether a number is a square.
  DUP 0< IF DROP FALSE EXIT THEN DUP ISQRT SQUARED = ;
: CUBE? ( n -- flag ) \ Whether a number that is not negative is a third power.
  0 BEGIN 2DUP CUBED > WHILE 1+ REPEAT CUBED = ;
: PERFECT? ( n -- flag ) \ Whether a positive number is the sum of its smaller divisors.
  DUP SUM-DIVISORS OVER - = ;
: POWER-OF-2? ( n -- flag ) \ Whether a number is 1, 2, 4, 8, ...
  DUP 0> SWAP POPCOUNT 1 = AND ;
: TRIANGULAR? ( n -- flag ) \ Whether a number is 0, 1, 3, 6, 10, ...
  8 * 1+ SQUARE? ;
: FIBONACCI? ( n -- flag ) \ Whether a number is a Fibonacci number.
  SQUARED 5* DUP 4 + SQUARE? SWAP 4 - SQUARE? OR ;
: PALINDROME? ( n -- flag ) \ Whether a number reads the same from both ends.
  DUP REVERSE-DIGITS = ;
: LEAP-YEAR? ( year -- flag ) \ Whether a year has 366 days.
  DUP 400 MULTIPLE? OVER 100 MULTIPLE? NOT ROT 4 MULTIPLE? AND OR ;
: TRIANGLE? ( a b c -- flag ) \ Whether three lengths make a triangle.
  3DUP MAX3 >R + + R> 2* > ;
: PYTHAGOREAN? ( a b c -- flag ) \ Whether a*a + b*b = c*c.
  SQUARED -ROT SQ+ = ;
: ASCENDING? ( a b c -- flag ) \ Whether a < b < c.
  OVER > -ROT < AND ;
: 3= ( a b c -- flag ) \ Whether three numbers are equal.
  OVER = -ROT = AND ;
: BOTH ( flag flag -- flag ) \ Whether both are not 0.
  0<> SWAP 0<> AND ;
: EITHER ( flag flag -- flag ) \ Whether one is not 0.
  OR 0<> ;
: NEITHER ( flag flag -- flag ) \ Whether both are 0.
  OR 0= ;

\ chapter: bits
: PARITY ( n -- 0|1 ) \ 1 where an odd number of bits is set.
  POPCOUNT 1 AND ;
: NAND ( a b -- n ) \ The bits that not both have.
  AND INVERT ;
: NOR ( a b -- n ) \ The bits that none has.
  OR INVERT ;
: XNOR ( a b -- n ) \ The bits that both have or none has.
  XOR INVERT ;
: LOW-BYTE ( n -- byte ) \ The lowest eight bits.
  255 AND ;
: MASK ( count -- n ) \ A number whose lowest bits are set.
  1 SWAP LSHIFT 1- ;
: LOWEST-BIT ( n -- bit ) \ The lowest bit that is set, as a number.
  DUP NEGATE AND ;
: TRAILING-ZEROS ( n -- count ) \ Zeros below the lowest bit that is set; n is not 0.
  LOWEST-BIT 1- POPCOUNT ;
: GRAY ( n -- g ) \ The Gray code of a number.
  DUP 1 RSHIFT XOR ;
: HAMMING ( a b -- count ) \ In how many bits two numbers differ.
  XOR POPCOUNT ;
: BITS@ ( n low count -- value ) \ The bits of a number from place low on.
  MASK -ROT RSHIFT AND ;

\ chapter: stack
: 2PICK ( a b c -- a b c a ) \ Like 2 PICK.
  2 PICK ;
: DROP-IF ( x flag -- x | ) \ Remove the number where the flag is not 0.
  IF DROP THEN ;
: ?SWAP ( a b flag -- a b | b a ) \ Exchange where the flag is not 0.
  IF SWAP THEN ;
: CHOOSE-IF ( a b flag -- a|b ) \ The first where the flag is not 0, else the second.
  IF DROP ELSE NIP THEN ;
: NDROP ( ... n -- ) \ Remove n numbers.
  0 ?DO DROP LOOP ;
: NDUP ( x n -- x ... x ) \ n copies of a number.
  DUP 0= IF 2DROP EXIT THEN 1 ?DO DUP LOOP ;
: SUM-ALL ( ... -- sum ) \ Add every number on the stack.
  DEPTH 0= IF 0 EXIT THEN BEGIN DEPTH 1 > WHILE + REPEAT ;
: MAX-ALL ( ... -- largest ) \ The largest number on the stack, which must hold one.
  BEGIN DEPTH 1 > WHILE MAX REPEAT ;
: MIN-ALL ( ... -- smallest ) \ The smallest number on the stack, which must hold one.
  BEGIN DEPTH 1 > WHILE MIN REPEAT ;
: RANGE ( from to -- ... ) \ All numbers from `from` to before `to`.
  SWAP ?DO I LOOP ;

\ chapter: memory
: ON ( addr -- ) \ Write true to a cell.
  TRUE SWAP ! ;
: OFF ( addr -- ) \ Write 0 to a cell.
  0 SWAP ! ;
: ++ ( addr -- ) \ Add 1 to a cell.
  1 SWAP +! ;
: -- ( addr -- ) \ Subtract 1 from a cell.
  -1 SWAP +! ;
: TOGGLE ( addr -- ) \ Turn the flag in a cell round.
  DUP @ 0= SWAP ! ;
: EXCHANGE ( addr addr' -- ) \ Exchange two cells.
  2DUP @ SWAP @ ROT ! SWAP ! ;
: NTH ( addr k -- addr' ) \ The address of the k-th cell.
  CELLS + ;
: NTH@ ( addr k -- x ) \ Read the k-th cell.
  NTH @ ;
: NTH! ( x addr k -- ) \ Write the k-th cell.
  NTH ! ;
: CELLS-SUM ( addr n -- sum ) \ The sum of n cells.
  0 -ROT 0 ?DO TUCK I NTH@ + SWAP LOOP DROP ;
: CELLS-PRODUCT ( addr n -- product ) \ The product of n cells.
  1 -ROT 0 ?DO TUCK I NTH@ * SWAP LOOP DROP ;
: CELLS-MAX ( addr n -- largest ) \ The largest of n cells; n is at least 1.
  OVER @ -ROT 0 ?DO TUCK I NTH@ MAX SWAP LOOP DROP ;
: CELLS-MIN ( addr n -- smallest ) \ The smallest of n cells; n is at least 1.
  OVER @ -ROT 0 ?DO TUCK I NTH@ MIN SWAP LOOP DROP ;
: CELLS-FILL ( addr n x -- ) \ Write one number to n cells.
  -ROT 0 ?DO 2DUP I NTH! LOOP 2DROP ;
: CELLS-COUNT ( addr n x -- count ) \ How many of n cells hold x.
  0 SWAP 2SWAP 0 ?DO 2DUP I NTH@ = IF ROT 1+ -ROT THEN LOOP 2DROP ;
: CELLS-PRINT ( addr n -- ) \ Print n cells.
  0 ?DO DUP I NTH@ . LOOP DROP ;
: CELLS-REVERSE ( addr n -- ) \ Turn the order of n cells round.
  DUP 2/ 0 ?DO 2DUP 1- I - NTH >R OVER I NTH R> EXCHANGE LOOP 2DROP ;
: CELLS-IOTA ( addr n -- ) \ Write 0, 1, 2, ... to n cells.
  0 ?DO I OVER I NTH! LOOP DROP ;
: CELLS-EACH ( addr n xt -- ) \ Call a word with each of n cells.
  SWAP 0 ?DO 2DUP 2>R SWAP I NTH@ SWAP EXECUTE 2R> LOOP 2DROP ;

\ chapter: output
: PRINT-LINE ( n -- ) \ Print a number on a line of its own.
  . CR ;
: .BOOL ( flag -- ) \ Print true or false.
  IF ." true " ELSE ." false " THEN ;
: .PAIR ( a b -- ) \ Print two numbers as (a,b).
  SWAP ." (" 0 .R ." ," 0 .R ." ) " ;
: .SIGNED ( n -- ) \ Print a number with its sign, also +.
  DUP 0> IF ." +" THEN . ;
: .DIGITS ( n -- ) \ Print the digits of a number, last one first.
  ABS BEGIN 10 /MOD SWAP . DUP 0= UNTIL DROP ;
: .TIMES ( char n -- ) \ Print a character n times.
  0 ?DO DUP EMIT LOOP DROP ;
: .RANGE ( from to -- ) \ Print all numbers from `from` to before `to`.
  SWAP ?DO I . LOOP ;
: .CENTS ( n -- ) \ Print cents with a point: 1234 as 12.34.
  DUP ABS S>D <# # # '.' HOLD #S ROT SIGN #> TYPE SPACE ;
: .TIME ( minutes -- ) \ Print minutes as hours:minutes.
  60 /MOD 0 .R ." :" DUP 10 < IF ." 0" THEN . ;
: TAB ( -- ) \ Print a tabulator.
  9 EMIT ;
: .LINE ( n -- ) \ Print n minus signs and a new line.
  '-' SWAP .TIMES CR ;

\ chapter: strings
: S-EMPTY? ( addr n -- flag ) \ Whether a string has no characters.
  NIP 0= ;
: S-LEN ( addr n -- n ) \ How many characters a string has.
  NIP ;
: S-FIRST ( addr n -- char ) \ The first character.
  0 S-AT ;
: S-LAST ( addr n -- char ) \ The last character.
  DUP 1- S-AT ;
: S-REST ( addr n -- addr' n' ) \ The string without its first character.
  1 /STRING ;
: S-PALINDROME? ( addr n -- flag ) \ Whether a string reads the same from both ends.
  2DUP S-REVERSE S= ;
: S-TYPE-LINE ( addr n -- ) \ Print a string and a new line.
  TYPE CR ;
: S-REPEAT ( addr n k -- addr' n' ) \ A string k times.
  >R S" " R> 0 ?DO 2OVER S+ LOOP 2NIP ;
: S-VOWELS ( addr n -- count ) \ How many vowels a string has.
  0 -ROT 0 ?DO DUP I + C@ VOWEL? NEGATE ROT + SWAP LOOP DROP ;
: S-DIGITS ( addr n -- count ) \ How many digits a string has.
  0 -ROT 0 ?DO DUP I + C@ DIGIT? NEGATE ROT + SWAP LOOP DROP ;
: S-WORDS ( addr n -- count ) \ How many texts between spaces a string has.
  0 -ROT TRUE -ROT 0 ?DO
    DUP I + C@ SPACE? ROT OVER NOT AND NEGATE >R SWAP ROT R> + -ROT
  LOOP 2DROP ;
: S-SUM ( addr n -- sum ) \ The sum of the characters of a string.
  0 -ROT 0 ?DO DUP I + C@ ROT + SWAP LOOP DROP ;
: S-ANAGRAM? ( addr n addr n -- flag ) \ Whether two strings have the same characters.
  S-SORT 2SWAP S-SORT S= ;
: S-PRINT-REVERSED ( addr n -- ) \ Print a string from its end.
  S-REVERSE TYPE ;
: ROT13 ( char -- char ) \ A letter moved by 13 places; anything else stays.
  DUP UPPER? IF 65 - 13 + 26 MOD 65 + EXIT THEN
  DUP LOWER? IF 97 - 13 + 26 MOD 97 + THEN ;

\ chapter: double
: D0> ( d -- flag ) \ Whether a number of two cells is positive.
  2DUP D0= >R D0< R> OR NOT ;
: D1+ ( d -- d ) \ Add 1 to a number of two cells.
  1 M+ ;
: DSQUARED ( n -- d ) \ The square of a number, with two cells.
  DUP M* ;

\ chapter: floats
: FAVERAGE ( F: x y -- mean ) \ The mean of two floats.
  F+ F2/ ;
: FSGN ( -- n F: x -- ) \ The sign of a float as a number.
  FDUP F0> IF FDROP 1 EXIT THEN F0< ;
: FCUBED ( F: x -- y ) \ The third power of a float.
  FDUP FDUP F* F* ;
: CIRCLE-AREA ( F: radius -- area ) \ The area of a circle.
  FSQUARED FPI F* ;
: C>F ( F: celsius -- fahrenheit ) \ Degrees Celsius to degrees Fahrenheit.
  1.8e F* 32e F+ ;
: F>C ( F: fahrenheit -- celsius ) \ Degrees Fahrenheit to degrees Celsius.
  32e F- 1.8e F/ ;
: FMEDIAN3 ( F: x y z -- middle ) \ The middle one of three floats.
  FOVER FOVER FMIN -FROT FMAX FROT FMIN FMAX ;
