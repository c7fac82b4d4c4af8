// What the scripts of the page take from outside of them.
declare const uPlot: any;
